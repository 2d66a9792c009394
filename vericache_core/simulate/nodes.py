"""Devices and links of the remote scenario under a virtual clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from vericache_core.runtime.admission import AdmissionPolicy
from vericache_core.runtime.costs import Block, CostModel, Link, StepLoad
from vericache_core.runtime.schedulable import NOTHING, Bytes, Part
from vericache_core.runtime.scheduler import StaggeredScheduler


class Clock:
    """Events in the order of their time; of one time in the order in which they were made."""

    def __init__(self) -> None:
        self.now = 0.0
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time: float, event: Callable[[], None]) -> None:
        """Run ``event`` then."""
        heapq.heappush(self._coming, (max(time, self.now), next(self._numbers), event))

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._coming:
            self.now, _, event = heapq.heappop(self._coming)
            event()


class Wire:
    """A link: one transfer after the other, each in full."""

    def __init__(self, clock: Clock, link: Link) -> None:
        self._clock, self.link = clock, link
        self._free = 0.0
        self.nbytes = self.busy = 0.0
        self.waiting = 0

    def send(self, nbytes: float) -> float:
        """Queue a transfer; returns when the last byte arrives. ``waiting`` counts it until then."""
        self._free = max(self._free, self._clock.now) + nbytes * self.link.seconds_per_byte
        self.nbytes += nbytes
        self.busy += nbytes * self.link.seconds_per_byte
        self.waiting += 1
        arrival = self._free + self.link.latency
        self._clock.at(arrival, self._arrived)
        return arrival

    def _arrived(self) -> None:
        self.waiting -= 1


@dataclass(eq=False)
class Live:
    """A request that a drafter has taken on.

    Attributes:
        phase: ``loading``, ``drafting``, ``plain``, or ``out`` while the store verifies.
        reads: device bytes that one row of it reads.
    """

    number: int
    new_tokens: int
    phase: Literal["loading", "drafting", "plain", "out"] = "loading"
    committed: int = 0
    drafts: int = 0
    window: int = 0
    reads: float = 0.0

    @property
    def target(self) -> int:
        """Drafts before it asks: no more than can still be committed beside the store's own token."""
        return max(0, min(self.window, self.new_tokens - self.committed - 1))


class Drafter:
    """A device that runs a row of every request that drafts or decodes plainly, step after step.

    Args:
        clock, costs: of the simulation.
        asked: called when a request has drafted its window.
        decoded: called when a plain request has one token more.
    """

    def __init__(self, clock: Clock, costs: CostModel, asked: Callable[[Live], None], decoded: Callable[[Live], None]) -> None:
        self._clock, self._costs, self._asked, self._decoded = clock, costs, asked, decoded
        self.active: dict[int, Live] = {}
        self.busy = 0.0
        self.rows = 0
        self._stepping = False

    def run(self, request: Live) -> None:
        """Give it rows from the next step on."""
        self.active[request.number] = request
        self._begin()

    def _begin(self) -> None:
        if self._stepping or not self.active:
            return
        for request in [r for r in self.active.values() if r.phase == "drafting" and not r.target]:
            self._ask(request)
        if not self.active:
            return
        self._stepping = True
        inside = list(self.active.values())
        read = Block(sum(request.reads for request in inside))
        seconds = self._costs.compute_seconds(StepLoad(len(inside), (read,)))
        self.busy += seconds
        self.rows += len(inside)
        self._clock.at(self._clock.now + seconds, lambda: self._end(inside))

    def _end(self, inside: list[Live]) -> None:
        self._stepping = False
        for request in inside:
            if request.phase == "plain":
                self._decoded(request)
            elif request.phase == "drafting":
                request.drafts += 1
                if request.drafts >= request.target:
                    self._ask(request)
        self._begin()

    def _ask(self, request: Live) -> None:
        del self.active[request.number]
        request.phase = "out"
        self._asked(request)

    def leave(self, request: Live) -> None:
        """It gets no more rows."""
        self.active.pop(request.number, None)


class Shared(Protocol):
    """KV that several requests use."""

    @property
    def share(self) -> float:
        """Bytes of one user."""


@dataclass(eq=False)
class Job:
    """Work beside the store: a verify, or a request that decodes plainly. See ``Schedulable`` for most of it.

    Attributes:
        asks: what to call when it is done, and with how many rows each; several where requests share a prefix.
        streams: bytes to be read before; 0 where the full KV is held.
    """

    number: int
    arrival: float
    tokens: int
    full_bytes: float
    drafting: bool
    streams: float = 0.0
    link_seconds: float = 0.0
    asks: list[tuple[int, Callable[[], None]]] = field(default_factory=list)
    own: float = 0.0
    prefix: Shared | None = None
    arrives: float | None = None
    now: Callable[[], float] = lambda: 0.0
    priority: int = 0
    prefill: int = 0

    @property
    def holds(self) -> Bytes:
        """See the protocol."""
        return NOTHING if self.prefix is None else Bytes(self.own + self.prefix.share, 0.0, 0.0)

    @property
    def rows(self) -> int:
        """Of its verify, the newest committed tokens included."""
        return sum(rows for rows, _ in self.asks)

    @property
    def drafts(self) -> int:
        """See the protocol; all are there when it is submitted."""
        return max(0, self.rows - 1) if self.drafting else 0

    @property
    def window(self) -> int:
        """See the protocol. One is as short as can be: whatever is drafted is verified as soon as there is a place."""
        return min(1, self.drafts)

    @property
    def most(self) -> int:
        """See the protocol."""
        return self.drafts

    @property
    def transient(self) -> float:
        """See the protocol."""
        return self.streams

    @property
    def away(self) -> bool:
        """See the protocol."""
        return False

    @property
    def swapped_in(self) -> bool:
        """See the protocol."""
        return not self.streams or (self.arrives is not None and self.arrives <= self.now() + 1e-12)


class Verifier:
    """The device beside the store, run by the runtime's own scheduler: streams, verifies and plain rows share its steps.

    Args:
        clock, costs: of the simulation.
        wire: from the store.
        memory: device bytes for KV.
        decoded: called with the number of a plain job that has one token more.
    """

    def __init__(self, clock: Clock, costs: CostModel, wire: Wire, memory: float, decoded: Callable[[int], None]) -> None:
        self._clock, self._costs, self._wire, self._decoded = clock, costs, wire, decoded
        self.scheduler = StaggeredScheduler(Bytes(memory), 512, AdmissionPolicy(queue=1 << 30, running=1 << 30))
        self.jobs: dict[int, Job] = {}
        self.busy = 0.0
        self.verified_rows = self.plain_rows = self.verifies = 0
        self._numbers = itertools.count()
        self._stepping = False

    def decode(self, tokens: int, full_bytes: float, own: float, prefix: Shared) -> int:
        """A plain request whose full KV is here, ``own`` bytes of it beside its share of a prefix; returns its number."""
        return self._submit(Job(next(self._numbers), self._clock.now, tokens, full_bytes, False, own=own, prefix=prefix))

    def verify(self, tokens: int, full_bytes: float, rows: int, done: Callable[[], None], *, stream: bool) -> int:
        """Verify ``rows`` rows; with ``stream`` the full KV is read from the store first."""
        streams = full_bytes if stream else 0.0
        link = self._wire.link.seconds(streams)
        job = Job(next(self._numbers), self._clock.now, tokens, full_bytes, True, streams, link, [(rows, done)])
        return self._submit(job)

    def join(self, number: int, rows: int, done: Callable[[], None]) -> bool:
        """Let rows of another request of the same prefix ride along; False if it is too late."""
        job = self.jobs.get(number)
        if job is None or job.arrives is not None or job.rows + rows > self.scheduler.rows // 2:
            return False
        job.asks.append((rows, done))
        return True

    def finish(self, number: int) -> None:
        """A plain request is complete, or given up."""
        self.scheduler.remove(number)
        del self.jobs[number]

    def _submit(self, job: Job) -> int:
        job.now = lambda: self._clock.now
        self.jobs[job.number] = job
        self.scheduler.submit(job)
        self._begin()
        return job.number

    def _begin(self) -> None:
        if self._stepping or not self.jobs:
            return
        now = self._clock.now
        plan = self.scheduler.plan(now)
        parts = [part for part in plan.parts if part.number in self.jobs]
        verifying = [self.jobs[part.number] for part in parts if self.jobs[part.number].drafting]
        for number in dict.fromkeys([*(job.number for job in verifying), *plan.streams]):
            job = self.jobs[number]
            if job.arrives is None:
                job.arrives = self._wire.send(job.streams) if job.streams else now
        if not parts:
            return
        seconds = self._costs.compute_seconds(self._load(parts))
        self.busy += seconds
        wait = max((job.arrives or now for job in verifying), default=now) - now
        if wait > 0:
            seconds = self._costs.overlapped(seconds, wait)
        self._stepping = True

        def end() -> None:
            self.scheduler.done(plan, seconds)
            self._end(parts)

        self._clock.at(now + seconds, end)

    def _load(self, parts: list[Part]) -> StepLoad:
        rows, blocks = 0, []
        for part in parts:
            job = self.jobs[part.number]
            blocks.append(Block(job.full_bytes, job.rows * job.tokens if job.drafting else 0.0))
            if job.drafting:
                rows += job.rows
                self.verified_rows += job.rows
                self.verifies += 1
            else:
                rows += 1
                self.plain_rows += 1
        return StepLoad(rows, tuple(blocks))

    def _end(self, parts: list[Part]) -> None:
        for part in parts:
            job = self.jobs[part.number]
            if job.drafting:
                self.finish(part.number)
                for _, done in job.asks:
                    done()
            else:
                self._decoded(part.number)
        self._stepping = False
        self._begin()
