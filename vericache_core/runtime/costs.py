"""Cost model: seconds of a step as a function of what it carries, fitted to measured steps.

A step costs the time of its row shape (weights are read and multiplied once for all rows, short steps are
padded up to the next shape), plus the time to read the KV that its rows attend to, plus the arithmetic of rows
that come in blocks. A swap costs a latency and its bytes; layers stream in while others compute.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vericache_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What a step carries.

    Attributes:
        rows: query rows, 1 or more; the step is padded to the next shape.
        read_bytes: device KV bytes that attention reads. A row of a draft or of plain decoding reads its cache once;
            the rows of one verify or prefill share one reading.
        pairs: for rows that come in blocks (verify, prefill), rows times cached tokens, summed: their arithmetic.
    """

    rows: int
    read_bytes: float = 0.0
    pairs: float = 0.0

    def __add__(self, other: StepLoad) -> StepLoad:
        return StepLoad(self.rows + other.rows, self.read_bytes + other.read_bytes, self.pairs + other.pairs)


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
        read: seconds per byte of device KV read.
        pair: seconds per pair of block row and cached token.
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
        return self.rows_seconds(load.rows) + load.read_bytes * self.read + load.pairs * self.pair

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
    shapes = sorted({sample.load.rows for sample in steps})
    rows = [
        [*(float(sample.load.rows == shape) for shape in shapes), sample.load.read_bytes, sample.load.pairs] for sample in steps
    ]
    found = _not_negative(rows, [sample.seconds for sample in steps])
    links = {}
    for tier in sorted({swap.tier for swap in swaps}):
        own = [swap for swap in swaps if swap.tier == tier]
        latency, per_byte = _not_negative([[1.0, swap.nbytes] for swap in own], [swap.seconds for swap in own])
        links[tier] = Link(latency, per_byte)
    return CostModel(dict(zip(shapes, found, strict=False)), found[-2], found[-1], links, layers)


def _not_negative(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Least squares of relative errors under "no unknown is negative".

    The best solution is an ordinary one over some subset of the unknowns, and there are few of them: the subsets
    are tried, largest first, and the first whose error nobody beats wins.
    """
    import numpy as np

    matrix = np.array([[value / time for value in row] for row, time in zip(rows, seconds, strict=True)])
    scale = np.abs(matrix).max(axis=0)
    used = [column for column in range(matrix.shape[1]) if scale[column] > 0]
    matrix = matrix[:, used] / scale[used]
    target = np.ones(len(seconds))
    best, error = np.zeros(len(used)), math.inf
    for count in range(len(used), 0, -1):
        for subset in itertools.combinations(range(len(used)), count):
            found = np.linalg.lstsq(matrix[:, subset], target, rcond=None)[0]
            if (found < 0).any():
                continue
            residual = float(((matrix[:, subset] @ found - target) ** 2).sum())
            if residual < error - 1e-12:
                best, error = np.zeros(len(used)), residual
                best[list(subset)] = found
        if error < math.inf and count == len(used):
            break  # no constraint binds
    costs = np.zeros(len(scale))
    costs[used] = best / scale[used]
    return [float(cost) for cost in costs]
