"""The remote scenario: one store with a device beside it, drafters behind slow links, and which path a request takes.

Paths are those of ``vericache_core.remote``: the store may generate (``remote``), a drafter may fetch the full KV and
decode plainly (``fetch``), draft with compressed KV while the store verifies, holding the full KV for as long
(``verify``) or reading it anew each time (``verify-stateless``), and it may do so only until the rest of the full KV has
come (``stream``, ``stream-stateless``).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from vericache_core.runtime.costs import CostModel, Link, StepLoad
from vericache_core.runtime.rounds import WINDOWS
from vericache_core.simulate.request import Compression

Path = Literal["remote", "fetch", "verify", "verify-stateless", "stream", "stream-stateless"]
PATHS: Final[tuple[Path, ...]] = get_args(Path)
PLAIN: Final[tuple[Path, ...]] = ("remote", "fetch")
"""What there is without VeriCache."""
RESOURCES: Final = ("slow link", "fast link", "store device", "drafter device", "store memory", "drafter memory")
MOST_ROWS: Final = 256
"""Requests that a drafter runs side by side at most."""


@dataclass(frozen=True)
class Fleet:
    """What is simulated. All devices are alike; every drafter has a slow link of its own.

    Attributes:
        drafters: number of them.
        costs: of the model on one device.
        token_bytes: of KV per token.
        memory: bytes for KV on each device.
        slow, fast: from the store to a drafter, and to the device beside it; ``latency`` is that of one way.
        compression: of the drafts; ``delta`` says that only what the draft KV lacks has to follow it.
        expanded: the draft KV takes as much memory as the full KV, as where codes are decoded when they come.
        window: drafts before a verify, or None for the best under the plan.
        sharing: requests in a row that share their prompt.
        paths: that may be taken.
        ahead: transfers that may wait for a link before a device takes on another request.
    """

    drafters: int
    costs: CostModel
    token_bytes: int
    memory: float
    slow: Link = field(default_factory=lambda: Link(0.005, 1 / 1.2e9))
    fast: Link = field(default_factory=lambda: Link(1e-4, 1 / 40e9))
    compression: Compression = field(default_factory=lambda: Compression(0.3, 0.02, delta=False))
    expanded: bool = False
    window: int | None = None
    sharing: int = 1
    paths: tuple[Path, ...] = PATHS
    ahead: int = 1

    def full_bytes(self, tokens: float) -> float:
        """Of so many tokens."""
        return tokens * self.token_bytes

    def draft_bytes(self, prompt: int) -> float:
        """Device bytes of the compressed prefix."""
        return self.full_bytes(prompt) * (1.0 if self.expanded else self.compression.keep)

    def following_bytes(self, prompt: int) -> float:
        """What follows the compressed prefix over the slow link, to make it whole."""
        return self.full_bytes(prompt) * (1 - self.compression.keep if self.compression.delta else 1.0)


@dataclass(frozen=True)
class Plan:
    """How the requests are dealt out.

    Attributes:
        window: drafts before a verify; 0 when nothing is drafted.
        rates: requests a second by path, in the steady state that the plan is for.
        held: bytes beside the store that are kept for full KV of requests on ``verify`` and ``stream``.
    """

    window: int
    rates: Mapping[Path, float]
    held: float

    @property
    def rate(self) -> float:
        """Requests a second, all together."""
        return sum(self.rates.values())

    def share(self, path: Path) -> float:
        """Of the requests."""
        return self.rates.get(path, 0.0) / self.rate if self.rate else 0.0


def make_plan(fleet: Fleet, prompt: int, new_tokens: int, paths: Sequence[Path] | None = None) -> Plan:
    """The mix of paths with the most requests a second, for requests that are all alike.

    A linear program: each path takes so much of each resource a request, and no resource is used beyond what there is.
    """
    allowed = tuple(path for path in PATHS if path in (fleet.paths if paths is None else paths))
    drafting = any(path not in PLAIN for path in allowed)
    windows = [0] if not drafting else [fleet.window] if fleet.window else [w for w in WINDOWS if w and w % 4 == 0]
    best: Plan | None = None
    for window in windows:
        plan = _planned(fleet, prompt, new_tokens, allowed, window)
        if best is None or plan.rate > best.rate * (1 + 1e-9):
            best = plan
    assert best is not None
    return best


def _planned(fleet: Fleet, prompt: int, new_tokens: int, allowed: Sequence[Path], window: int) -> Plan:
    uses = {path: use_of(fleet, path, prompt, new_tokens, window) for path in allowed}
    there = (fleet.drafters, 1.0, 1.0, fleet.drafters, fleet.memory, fleet.drafters * fleet.memory)
    # A path whose single request has no room anywhere is none.
    fits = [path for path in allowed if fits_in(fleet, path, prompt, new_tokens)]
    found = most_of([uses[path] for path in fits], there)
    rates = {path: rate for path, rate in zip(fits, found, strict=True) if rate > 1e-12}
    memory = RESOURCES.index("store memory")
    held = sum(rate * uses[path][memory] for path, rate in rates.items() if path in {"verify", "stream"})
    one = fleet.full_bytes(prompt + new_tokens)
    return Plan(window, rates, max(held, one) if held else 0.0)


def fits_in(fleet: Fleet, path: Path, prompt: int, new_tokens: int) -> bool:
    """Whether the devices have room for one request on this path."""
    return drafter_bytes(fleet, path, prompt, new_tokens) <= fleet.memory and (
        path == "fetch" or fleet.full_bytes(prompt + new_tokens) <= fleet.memory
    )


def drafter_bytes(fleet: Fleet, path: Path, prompt: int, new_tokens: int) -> float:
    """What a request takes of a drafter's memory at its greatest length."""
    if path == "remote":
        return 0.0
    full, tail = fleet.full_bytes(prompt), fleet.full_bytes(new_tokens)
    if path == "fetch":
        return full + tail
    return fleet.draft_bytes(prompt) + tail + (full if path.startswith("stream") else 0.0)


def use_of(fleet: Fleet, path: Path, prompt: int, new_tokens: int, window: int) -> tuple[float, ...]:
    """What one request takes of each of ``RESOURCES``: seconds of links and devices, byte-seconds of memory.

    Steps are those of a device whose memory is full. Rows of verifies cost their arithmetic, and what they read; the
    weights are read for the requests that decode plainly beside them.
    """
    costs, full = fleet.costs, fleet.full_bytes(prompt + new_tokens / 2)
    shared = 1 / fleet.sharing  # of what is moved or held for a prefix
    load, tail = fleet.full_bytes(prompt), fleet.full_bytes(new_tokens)
    step, row = _plain_step(fleet, full, load * shared + tail)
    if path == "remote":
        wait = fleet.fast.seconds(load) * shared
        return 0.0, wait, new_tokens * row, 0.0, (load * shared + tail) * (wait + new_tokens * step), 0.0
    if path == "fetch":
        wait = fleet.slow.seconds(load) * shared
        return wait, 0.0, 0.0, new_tokens * row, 0.0, (load * shared + tail) * (wait + new_tokens * step)
    slow = wait = fleet.slow.seconds(load * fleet.compression.keep) * shared
    draft_step, draft_row = _draft_step(fleet, path, prompt, new_tokens)
    stream = fleet.fast.seconds(full)
    rows = window + 1
    verify = full * costs.read + rows * (prompt * costs.pair + costs.rows_seconds(512) / 512)
    stateless = path.endswith("stateless")
    cycle = window * draft_step + 2 * fleet.slow.latency + max(step, verify) + (stream if stateless else 0.0)
    rounds, plain = expected_rounds(fleet.compression.hazard, window, new_tokens), 0.0
    if path.startswith("stream"):
        rest = fleet.slow.seconds(fleet.following_bytes(prompt)) * shared
        drafted = min(1.0, rest / (cycle * rounds))
        slow, rounds, plain = slow + rest, rounds * drafted, new_tokens * (1 - drafted)
    place = drafter_bytes(fleet, path, prompt, 0) * shared + tail
    return (
        slow,
        rounds * stream if stateless else fleet.fast.seconds(load) * shared,
        rounds * verify,
        rounds * window * draft_row + plain * row,
        full * (stream + step) * rounds if stateless else (load * shared + tail) * cycle * rounds,
        place * (wait + rounds * cycle + plain * step),
    )


@functools.lru_cache(maxsize=4096)
def expected_rounds(hazard: float, window: int, new_tokens: int) -> float:
    """Verifies of an answer, the last of which are cut short by its end."""
    rounds = [0.0]
    for left in range(1, new_tokens + 1):
        drafts, total, chance = min(window, left - 1), 1.0, 1.0
        for accepted in range(drafts):
            total += chance * hazard * rounds[left - accepted - 1]
            chance *= 1 - hazard
        rounds.append(total + chance * rounds[left - drafts - 1])
    return rounds[-1]


def draft_step_seconds(fleet: Fleet, prompt: int, new_tokens: int) -> float:
    """A step of a drafter that is full of requests that draft."""
    return _draft_step(fleet, "verify", prompt, new_tokens)[0]


def _draft_step(fleet: Fleet, path: Path, prompt: int, new_tokens: int) -> tuple[float, float]:
    tail = fleet.full_bytes(new_tokens)
    held = drafter_bytes(fleet, path, prompt, 0) / fleet.sharing + tail
    return _plain_step(fleet, fleet.draft_bytes(prompt) + tail / 2, held)


def _plain_step(fleet: Fleet, read: float, held: float) -> tuple[float, float]:
    """Seconds of a step of as many requests as fit, each of which reads and holds so much, and each one's share."""
    count = max(1, min(MOST_ROWS, int(fleet.memory // held)))
    seconds = fleet.costs.compute_seconds(StepLoad(count, count * read))
    return seconds, seconds / count


def most_of(uses: Sequence[Sequence[float]], there: Sequence[float]) -> list[float]:
    """Rates, none below zero, of the largest sum whose uses stay within what is there.

    The best of a linear program lies on a corner, where as many limits bind as there are rates; there are few, so all
    corners are tried.
    """
    import numpy as np

    count = len(uses)
    if not count:
        return []
    limits = np.array([[use[i] / there[i] for use in uses] for i in range(len(there))])
    limits = np.vstack([limits, -np.eye(count)])
    bounds = np.array([1.0] * len(there) + [0.0] * count)
    best, most = np.zeros(count), 0.0
    for chosen in itertools.combinations(range(len(bounds)), count):
        corner = limits[list(chosen)]
        if abs(np.linalg.det(corner / np.maximum(np.abs(corner).max(axis=1, keepdims=True), 1e-300))) < 1e-12:
            continue
        found = np.linalg.solve(corner, bounds[list(chosen)])
        if (limits @ found <= bounds + 1e-9).all() and found.sum() > most * (1 + 1e-12):
            best, most = np.maximum(found, 0.0), float(found.sum())
    return [float(rate) for rate in best]
