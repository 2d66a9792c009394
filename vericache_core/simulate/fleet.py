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

from vericache_core.runtime.costs import Block, CostModel, Link, StepLoad
from vericache_core.runtime.rounds import WINDOWS
from vericache_core.simulate.compression import Compression

Path = Literal["remote", "fetch", "verify", "verify-stateless", "stream", "stream-stateless"]
PATHS: Final[tuple[Path, ...]] = get_args(Path)
PLAIN: Final[tuple[Path, ...]] = ("remote", "fetch")
"""What there is without VeriCache."""
RESOURCES: Final = (
    "slow link",
    "fast link",
    "store device",
    "drafter device",
    "plain places",
    "stream places",
    "held memory",
    "drafter memory",
)
MOST_STREAMS: Final = 4
"""Full caches that come in side by side beside the store at most: more than fill the link."""
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
        affinity: requests of one prompt go to one drafter, so that its KV crosses a slow link once; otherwise they go to
            whichever drafter has most room, and share only what is beside the store.
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
    affinity: bool = True
    paths: tuple[Path, ...] = PATHS
    ahead: int = 1

    @property
    def sharing_drafter(self) -> float:
        """Requests of one prompt that meet on one drafter."""
        return self.sharing if self.affinity else max(1.0, self.sharing / self.drafters)

    def full_bytes(self, tokens: float) -> float:
        """Of so many tokens."""
        return tokens * self.token_bytes

    def draft_bytes(self, prompt: int) -> float:
        """Device bytes of the compressed prefix."""
        return self.full_bytes(prompt) * (1.0 if self.expanded else self.compression.keep)

    def following_bytes(self, prompt: int) -> float:
        """What follows the compressed prefix over the slow link, to make it whole."""
        return self.full_bytes(prompt) * (1 - self.compression.keep if self.compression.delta else 1.0)


@dataclass(frozen=True, slots=True)
class Places:
    """How the memory beside the store is dealt out. Caches are large there, so that whole numbers matter.

    Attributes:
        plain: requests that decode plainly side by side.
        streams: full caches that come in for one verify each, side by side.
        held: bytes that are kept for full KV of requests on ``verify`` and ``stream``.
    """

    plain: int
    streams: int
    held: float


@dataclass(frozen=True)
class Plan:
    """How the requests are dealt out.

    Attributes:
        window: drafts before a verify; 0 when nothing is drafted.
        rates: requests a second by path, in the steady state that the plan is for.
        held: bytes beside the store that are kept for full KV of requests on ``verify`` and ``stream``.
        streamed: bytes beside the store that plain requests leave for streams.
    """

    window: int
    rates: Mapping[Path, float]
    held: float
    streamed: float = 0.0

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
    # A path whose single request has no room anywhere is none.
    fits = [path for path in allowed if fits_in(fleet, path, prompt, new_tokens)]
    best = Plan(windows[0], {}, 0.0)
    for places, window in itertools.product(_places(fleet, fits, prompt, new_tokens), windows):
        plan = _planned(fleet, prompt, new_tokens, fits, window, places)
        if plan.rate > best.rate * (1 + 1e-9):
            best = plan
    return best


def even_plan(fleet: Fleet, prompt: int, new_tokens: int) -> Plan:
    """Plain requests dealt out evenly, as many to each drafter as to the device beside the store, whatever their links.

    The slowest of them sets the pace; :func:`make_plan` over ``PLAIN`` is the best that plain decoding can do.
    """
    slowest = min(
        make_plan(fleet, prompt, new_tokens, ("remote",)).rate,
        make_plan(fleet, prompt, new_tokens, ("fetch",)).rate / fleet.drafters,
    )
    return Plan(0, {"remote": slowest, "fetch": slowest * fleet.drafters}, 0.0)


def _places(fleet: Fleet, paths: Sequence[Path], prompt: int, new_tokens: int) -> list[Places]:
    """Ways to deal out the memory beside the store that are worth telling apart."""
    one = fleet.full_bytes(prompt + new_tokens)
    most = int(fleet.memory // one)
    streams = range(min(most, MOST_STREAMS) + 1) if any(path.endswith("stateless") for path in paths) else range(1)
    found = []
    for count in streams:
        left = most - count
        held = sorted({round(left * i / 8) for i in range(9)}) if {"verify", "stream"} & set(paths) else [0]
        for kept in held:
            room = fleet.memory - (count + kept) * one
            plain = _fitting(room, fleet.full_bytes(prompt) / fleet.sharing + fleet.full_bytes(new_tokens))
            found.append(Places(plain, count, kept * one))
    return found


def _planned(fleet: Fleet, prompt: int, new_tokens: int, paths: Sequence[Path], window: int, places: Places) -> Plan:
    uses = {path: use_of(fleet, path, prompt, new_tokens, window, places) for path in paths}
    there = (fleet.drafters, 1.0, 1.0, fleet.drafters, places.plain, places.streams, places.held, fleet.drafters * fleet.memory)
    open_paths = [path for path in paths if all(limit or not use for use, limit in zip(uses[path], there, strict=True))]
    found = most_of([uses[path] for path in open_paths], there)
    rates = {path: rate for path, rate in zip(open_paths, found, strict=True) if rate > 1e-12}
    return Plan(window, rates, places.held, places.streams * fleet.full_bytes(prompt + new_tokens))


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


def use_of(fleet: Fleet, path: Path, prompt: int, new_tokens: int, window: int, places: Places) -> tuple[float, ...]:
    """What one request takes of each of ``RESOURCES``: seconds of links, devices and places, byte-seconds of memory.

    Steps are those of a device whose places are all taken. What verifies cost beside plain rows is what they read, their
    arithmetic, and the larger shape of the step.
    """
    costs, full = fleet.costs, fleet.full_bytes(prompt + new_tokens / 2)
    here, there = 1 / fleet.sharing, 1 / fleet.sharing_drafter  # of what is moved or held for a prefix
    load, tail = fleet.full_bytes(prompt), fleet.full_bytes(new_tokens)
    step, row = _shared_step(fleet, full, max(1, places.plain))
    if path == "remote":
        wait = fleet.fast.seconds(load) * here
        return 0.0, wait, new_tokens * row, 0.0, wait + new_tokens * step, 0.0, 0.0, 0.0
    own_step, own_row = _shared_step(fleet, full, max(1, _fitting(fleet.memory, load * there + tail)))
    if path == "fetch":
        wait = fleet.slow.seconds(load) * there
        return wait, 0.0, 0.0, new_tokens * own_row, 0.0, 0.0, 0.0, (load * there + tail) * (wait + new_tokens * own_step)
    slow = wait = fleet.slow.seconds(load * fleet.compression.keep) * there
    draft_step, draft_row = _draft_step(fleet, path, prompt, new_tokens)
    # Requests of one prompt ride along where streams are what all wait for.
    stream, rows = fleet.fast.seconds(full) * here, window + 1
    beside = costs.rows_seconds(places.plain) if places.plain else 0.0
    verify = costs.attention_seconds(full, rows * prompt) + costs.rows_seconds(places.plain + rows) - beside
    held = 1.5 * step + verify  # to the next step and through it
    stateless = path.endswith("stateless")
    cycle = window * draft_step + 2 * fleet.slow.latency + held + (stream if stateless else 0.0)
    rounds, plain = expected_rounds(fleet.compression.hazard, window, new_tokens), 0.0
    if path.startswith("stream"):
        rest = fleet.slow.seconds(fleet.following_bytes(prompt)) * there
        drafted = min(1.0, rest / (cycle * rounds))
        slow, rounds, plain = slow + rest, rounds * drafted, new_tokens * (1 - drafted)
    return (
        slow,
        rounds * stream if stateless else fleet.fast.seconds(load) * here,
        rounds * verify,
        rounds * window * draft_row + plain * own_row,
        0.0,
        rounds * (stream + held * here) if stateless else 0.0,
        0.0 if stateless else (load * here + tail) * (wait + cycle * rounds),  # a store holds it from the first message on
        (drafter_bytes(fleet, path, prompt, 0) * there + tail) * (wait + rounds * cycle + plain * own_step),
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
    held = drafter_bytes(fleet, path, prompt, 0) / fleet.sharing_drafter + tail
    return _shared_step(fleet, fleet.draft_bytes(prompt) + tail / 2, max(1, _fitting(fleet.memory, held)))


def _fitting(room: float, held: float) -> int:
    return min(MOST_ROWS, int(room // held))


def _shared_step(fleet: Fleet, read: float, count: int) -> tuple[float, float]:
    """Seconds of a step of so many requests, each of which reads so much, and each one's share."""
    seconds = fleet.costs.compute_seconds(StepLoad(count, (Block(count * read),)))
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
    limits = np.array([[use[i] / there[i] for use in uses] for i in range(len(there)) if any(use[i] for use in uses)])
    bounds = np.array([1.0] * len(limits) + [0.0] * count)
    limits = np.vstack([limits, -np.eye(count)])
    corners = np.array(list(itertools.combinations(range(len(bounds)), count)))
    matrices, sides = limits[corners], bounds[corners]
    scale = np.maximum(np.abs(matrices).max(axis=2, keepdims=True), 1e-300)
    proper = np.abs(np.linalg.det(matrices / scale)) >= 1e-12
    found = np.linalg.solve(matrices[proper], sides[proper][:, :, None])[:, :, 0]
    found = found[(found @ limits.T <= bounds + 1e-9).all(axis=1)]
    best = np.maximum(found[found.sum(axis=1).argmax()], 0.0)  # no rates at all are a corner, too
    return [float(rate) for rate in best]
