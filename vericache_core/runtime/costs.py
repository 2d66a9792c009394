"""Cost model: seconds of a step as a function of what it carries, fitted to measured steps.

A step costs the time of its row shape (weights are read and multiplied once for all rows, short steps are padded up
to the next shape), plus the attention of each of its blocks. A block reads its KV once for all its rows while it
multiplies, so that the shorter of the two hides in part behind the longer: together they take the root of the sum of
their squares (docs/scheduling.md has other forms). A swap costs a latency and its bytes; layers stream in while
others compute.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from vericache_core.errors import ConfigError

MOST_ROUNDS: Final = 50
"""Of a fit; about ten are enough."""
TOLERANCE: Final = 1e-12
"""Of costs in units of the largest share that they have in a measurement."""


class Block(NamedTuple):
    """Rows that attend to one cache.

    Attributes:
        read_bytes: device KV bytes that attention reads, once for all rows.
        pairs: rows times cached tokens. 0 for a single row (a draft, plain decoding), whose reading is all that shows:
            several of them may be one block, with what they read together.
    """

    read_bytes: float
    pairs: float = 0.0


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step carries.

    Attributes:
        rows: query rows, 1 or more; the step is padded to the next shape.
        blocks: what they attend to.
    """

    rows: int
    blocks: tuple[Block, ...] = ()


@dataclass(frozen=True, slots=True)
class Link:
    """The way of one tier to the device.

    Attributes:
        latency: seconds before the first byte.
        seconds_per_byte: after that.
    """

    latency: float
    seconds_per_byte: float

    def seconds(self, nbytes: float) -> float:
        """Seconds to move ``nbytes``; nothing to move costs nothing."""
        return self.latency + nbytes * self.seconds_per_byte if nbytes > 0 else 0.0


@dataclass(frozen=True)
class CostModel:
    """Measured or derived costs of one model on one machine.

    Attributes:
        shapes: seconds of a step by its number of rows, without any KV, ascending.
        read: seconds per byte of device KV read, where nothing hides it.
        pair: seconds per pair of block row and cached token, where nothing hides it.
        links: by tier, ``host`` and ``disk``.
        layers: of the model; a swap overlaps with compute layer by layer.

    Raises:
        ValueError: a cost is negative or there is no shape.
    """

    shapes: Mapping[int, float]
    read: float
    pair: float
    links: Mapping[str, Link] = field(default_factory=dict)
    layers: int = 1

    def __post_init__(self) -> None:
        numbers = [*self.shapes.values(), self.read, self.pair]
        numbers += [number for link in self.links.values() for number in (link.latency, link.seconds_per_byte)]
        if not self.shapes or min(self.shapes) < 1 or self.layers < 1:
            raise ValueError("a cost model needs shapes of 1 row or more and a layer")
        if not all(0 <= number < math.inf for number in numbers):
            raise ValueError("costs are finite and not negative")
        object.__setattr__(self, "shapes", dict(sorted(self.shapes.items())))

    def padded(self, rows: int) -> int:
        """Rows that a step of ``rows`` rows is padded to; beyond the largest shape it takes several of that one."""
        largest = 0
        for shape in self.shapes:
            if rows <= shape:
                return shape
            largest = shape
        return -(-rows // largest) * largest

    def rows_seconds(self, rows: int) -> float:
        """Seconds of a step of ``rows`` rows that attend to nothing."""
        shape = self.padded(rows)
        if shape in self.shapes:
            return self.shapes[shape]
        largest = max(self.shapes)
        return self.shapes[largest] * (shape // largest)

    def compute_seconds(self, load: StepLoad) -> float:
        """Seconds of a step that waits for no swap."""
        return self.rows_seconds(load.rows) + sum(self.attention_seconds(*block) for block in load.blocks)

    def attention_seconds(self, read_bytes: float, pairs: float = 0.0) -> float:
        """Seconds that a :class:`Block` of these adds to a step."""
        return math.hypot(read_bytes * self.read, pairs * self.pair)

    def swap_seconds(self, tier: str, nbytes: float) -> float:
        """Link seconds to bring ``nbytes`` from ``tier``.

        Raises:
            ConfigError: that tier was not calibrated.
        """
        if tier not in self.links:
            raise ConfigError(
                f"no cost is known for the {tier!r} tier",
                cause=f"calibrated tiers: {', '.join(self.links) or 'none'}",
                hint="calibrate again with this tier in use",
            )
        return self.links[tier].seconds(nbytes)

    def limited(self, bytes_per_s: float | None) -> CostModel:
        """The same machine with links that carry no more than ``bytes_per_s``; None for no limit."""
        if bytes_per_s is None:
            return self
        slowest = 1 / bytes_per_s
        links = {tier: Link(link.latency, max(link.seconds_per_byte, slowest)) for tier, link in self.links.items()}
        return replace(self, links=links)

    def overlapped(self, compute: float, link: float) -> float:
        """Seconds of a step whose layers stream in while earlier ones compute: the longer, and one layer of the other."""
        return max(compute, link) + min(compute, link) / self.layers

    def to_json(self) -> dict[str, Any]:
        """Return the model as JSON types."""
        return {
            "shapes": {str(rows): seconds for rows, seconds in self.shapes.items()},
            "read_seconds_per_byte": self.read,
            "pair_seconds": self.pair,
            "links": {
                tier: {"latency_seconds": link.latency, "seconds_per_byte": link.seconds_per_byte}
                for tier, link in self.links.items()
            },
            "layers": self.layers,
        }

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> CostModel:
        """Build a model from what :meth:`to_json` gave; anything else is a KeyError, TypeError or ValueError."""
        return cls(
            {int(rows): float(seconds) for rows, seconds in facts["shapes"].items()},
            float(facts["read_seconds_per_byte"]),
            float(facts["pair_seconds"]),
            {
                str(tier): Link(float(link["latency_seconds"]), float(link["seconds_per_byte"]))
                for tier, link in facts["links"].items()
            },
            int(facts["layers"]),
        )


@dataclass(frozen=True, slots=True)
class StepSample:
    """A measured step that waited for no swap; ``load.rows`` is the shape that ran, padding included."""

    load: StepLoad
    seconds: float


@dataclass(frozen=True, slots=True)
class SwapSample:
    """A measured swap."""

    tier: str
    nbytes: float
    seconds: float


def fit(steps: Sequence[StepSample], swaps: Sequence[SwapSample], layers: int) -> CostModel:
    """Fit a model to measurements: least squares of relative errors, no cost below zero.

    Raises:
        ConfigError: there are no steps, or a time that is not positive.
    """
    if not steps:
        raise ConfigError("a calibration without a measured step", hint="calibrate with at least one shape")
    for seconds in [*(step.seconds for step in steps), *(swap.seconds for swap in swaps)]:
        if not 0 < seconds < math.inf:
            raise ConfigError(f"a calibration sample took {seconds!r} seconds", hint="calibrate again")
    shapes, read, pair = _fit_steps(steps)
    links = {}
    for tier in sorted({swap.tier for swap in swaps}):
        own = [swap for swap in swaps if swap.tier == tier]
        latency, per_byte = _not_negative([[1.0, swap.nbytes] for swap in own], [swap.seconds for swap in own])
        links[tier] = Link(latency, per_byte)
    return CostModel(shapes, read, pair, links, layers)


def _fit_steps(steps: Sequence[StepSample]) -> tuple[dict[int, float], float, float]:
    """Costs of shapes, of a byte read and of a pair.

    Attention is not linear in the last two, but it is the sum of both, each times its slope. With the slopes of one
    solution the next is better, until they stand still.
    """
    shapes = sorted({sample.load.rows for sample in steps})
    seconds = [sample.seconds for sample in steps]
    blocks = [block for sample in steps for block in sample.load.blocks]
    # To begin with, reading and multiplying take equally long, on the whole.
    read = 1 / max(1.0, sum(block.read_bytes for block in blocks))
    pair = 1 / max(1.0, sum(block.pairs for block in blocks))
    costs: list[float] = []
    for _ in range(MOST_ROUNDS):
        rows = []
        for sample in steps:
            slopes = [_slopes(block, read, pair) for block in sample.load.blocks]
            attention = [sum(by_read for by_read, _ in slopes), sum(by_pair for _, by_pair in slopes)]
            rows.append([*(float(sample.load.rows == shape) for shape in shapes), *attention])
        before, costs = costs, _not_negative(rows, seconds)
        read, pair = costs[-2:]
        if before and all(math.isclose(*each, rel_tol=1e-6) for each in zip(before, costs, strict=True)):
            break
    return dict(zip(shapes, costs[:-2], strict=True)), read, pair


def _slopes(block: Block, read: float, pair: float) -> tuple[float, float]:
    """By how much the seconds of ``block`` grow with the cost of a byte, and with that of a pair."""
    reading, multiplying = block.read_bytes * read, block.pairs * pair
    together = math.hypot(reading, multiplying)
    return (block.read_bytes * reading / together, block.pairs * multiplying / together) if together else (0.0, 0.0)


def _not_negative(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Least squares of relative errors under "no unknown is negative", by the active sets of Lawson and Hanson.

    Unknowns are freed from zero one by one, the one that promises most first. Where that would take others below zero,
    they are bound to it again.
    """
    import numpy as np

    matrix = np.array([[value / time for value in row] for row, time in zip(rows, seconds, strict=True)])
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0] = 1.0  # what was never measured stays at zero
    matrix /= scale
    target = np.ones(len(seconds))
    found, free = np.zeros(len(scale)), np.zeros(len(scale), dtype=bool)
    for _ in range(3 * len(scale)):  # it ends by itself, but for rounding
        gain = np.where(free, 0.0, matrix.T @ (target - matrix @ found))
        if gain.max() <= TOLERANCE:
            break
        free[gain.argmax()] = True
        while free.any():
            best = np.zeros(len(scale))
            best[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            below = free & (best <= 0)
            if not below.any():
                found = best
                break
            found += min(found[below] / (found[below] - best[below])) * (best - found)
            free &= found > TOLERANCE
            found[~free] = 0.0
    return [float(cost) for cost in found / scale]
