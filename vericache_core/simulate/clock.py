"""The simulation itself: plans of a scheduler carried out under a virtual clock."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from vericache_core.errors import VeriCacheError
from vericache_core.runtime.admission import QueueFull
from vericache_core.runtime.costs import Block, CostModel, StepLoad
from vericache_core.runtime.rounds import RoundPricer, Situation
from vericache_core.runtime.schedulable import Part, Scheduler, StepPlan
from vericache_core.runtime.speculation import MOST_PROPOSALS, ProposalExperience, SpeculationPace
from vericache_core.runtime.timeline import Span
from vericache_core.simulate.beside import Background
from vericache_core.simulate.request import SimulatedRequest
from vericache_core.simulate.result import Result


class Simulation:
    """Runs requests to their end.

    Args:
        costs: of steps and swaps.
        scheduler: a fresh one.
        requests: in the order of arrival.
        lockstep: whether the scheduler is the lock-step one; the controllers' prices depend on it.
        background: a verify whose swap takes longer than a step that swaps nothing runs beside the steps of others, as in
            the engine; for requests whose full KV streams in while they verify.
        copies: seconds of compute that a swapped byte takes, where the cores that compute copy it.
        between: seconds of the host between two steps, for each request that had rows.
        rows: most rows of a step.
        proposals: experience of all requests with their proposals; None where their number is not chosen by cost.
        listener: hears what happens when, as an observer of the engine's loop does; seconds are virtual.
    """

    def __init__(
        self,
        costs: CostModel,
        scheduler: Scheduler,
        requests: Sequence[SimulatedRequest],
        *,
        lockstep: bool = False,
        background: bool = False,
        copies: float = 0.0,
        between: float = 0.0,
        rows: int = 512,
        proposals: ProposalExperience | None = None,
        listener: Callable[[Span], None] | None = None,
    ) -> None:
        self.costs, self.scheduler, self.lockstep = costs, scheduler, lockstep
        self._listener = listener
        self.copies, self.between, self._rows, self._proposals = copies, between, rows, proposals
        self.result = Result()
        self.now = 0.0
        self._coming = list(requests)
        self._requests: dict[int, SimulatedRequest] = {}
        self._pricer = RoundPricer(costs)
        self._background, self._beside = background, Background(costs)
        self._step_seconds = float("inf")

    def run(self, progress: Callable[[int], None] | None = None) -> Result:
        """Run to the end; ``progress`` is called with the number of finished requests."""
        start = self._coming[0].arrival if self._coming else 0.0
        self.now = start
        finished = 0
        while self._coming or self._requests:
            self._arrive()
            self._land()  # before the plan, which must not ask again for what a verdict has settled
            finished += self._leave()
            plan = self.scheduler.plan(self.now)
            if not plan.parts and self._beside.flight is None:
                if not self._coming:
                    if self._requests:
                        raise VeriCacheError("the simulation stands still", cause=f"{len(self._requests)} requests wait")
                    break
                self.now = max(self.now, self._coming[0].arrival)
                continue
            self._step(plan)
            finished += self._leave()
            if progress is not None:
                progress(finished)
        self.result.seconds = self.now - start
        return self.result

    def _arrive(self) -> None:
        while self._coming and self._coming[0].arrival <= self.now:
            request = self._coming.pop(0)
            try:
                self.scheduler.submit(request)
            except QueueFull:
                self.result.refused += 1
                continue
            self._requests[request.number] = request
            if request.lookup is not None and self._proposals is not None:
                prices = functools.partial(self._speculation_prices, request)
                request.speculation = SpeculationPace(request.lookup, self._proposals, prices, request.prompt)
            request.arrived(functools.partial(self._prices, request))

    def _step(self, plan: StepPlan) -> None:
        started = self.now
        for number in plan.preempt:
            if self._beside.flight is not None and self._beside.flight.number == number:
                self._wait()
            self._requests[number].preempted()
        parts = self._cut(self._without_slow(self._wanted(plan.parts)))
        if parts:
            self._run(parts, plan.streams)
        elif self._beside.flight is not None:
            self.result.exposed_seconds += self._wait()
        self.scheduler.done(plan, self.now - started)

    def _wanted(self, parts: Sequence[Part]) -> list[Part]:
        """What is planned, with proposals and without what finds no room to be swapped in."""
        wanted: list[Part] = []
        for part in parts:
            request = self._requests[part.number]
            if request.finished:
                continue
            asked = request.wanted(part)
            if asked.phase == "verify" and part.phase == "decode" and self._crowded(request, wanted):
                continue
            wanted.append(asked)
        return wanted

    def _cut(self, parts: Sequence[Part]) -> list[Part]:
        """What of ``parts`` the rows of a step carry; as in the engine, what comes last finds what is left of them."""
        kept: list[Part] = []
        left = self._rows
        for part in parts:
            rows = min(part.rows, left)
            if rows > 0:
                kept.append(replace(part, rows=rows))
                left -= rows
        return kept

    def _crowded(self, request: SimulatedRequest, others: Sequence[Part]) -> bool:
        """Whether ``request`` finds no room to be swapped in beside ``others`` of its step."""
        taken = sum(self._requests[part.number].transient for part in others if part.phase == "verify")
        held = sum(running.holds.device for running in self.scheduler.running)
        return taken > 0 and taken + request.transient > self.scheduler.budget.device - held

    def _without_slow(self, parts: Sequence[Part]) -> list[Part]:
        """Send at most one verify to the background; returns what is left to run now."""
        if not self._background:
            return list(parts)

        kept: list[Part] = []
        chosen: Part | None = None
        for part in parts:
            request = self._requests[part.number]
            long = part.phase == "verify" and request.swap_seconds > self._step_seconds
            if not long or part.rows > self._rows:
                kept.append(part)
            elif self._beside.flight is None and chosen is None:
                chosen = part
            elif request.may_draft_on:
                kept.append(Part(part.number, "draft", 1))
        if chosen is not None and not kept:
            return [chosen]  # there is nobody to hold up
        if chosen is not None:
            request = self._requests[chosen.number]
            request.away = True
            compute = self.costs.compute_seconds(self._load([chosen])) + self.copies * request.swap_bytes
            link = request.swap_seconds
            self._beside.start(self.now, chosen.number, chosen.rows, compute, link)
            self.result.background += 1
            self.result.swap_seconds += link
            self.result.swap_bytes += request.swap_bytes
        return kept

    def _land(self) -> None:
        """Take in what the background came to, if it did by now."""
        flight = self._beside.landed(self.now)
        if flight is None:
            return
        self._tell(Span(flight.number, "verify", flight.starts, flight.ends, flight.rows, background=True))
        self._tell(Span(flight.number, "swap", flight.starts, flight.arrived))
        self._apply(Part(flight.number, "verify", flight.rows))

    def _tell(self, span: Span) -> None:
        if self._listener is not None:
            self._listener(span)

    def _wait(self) -> float:
        """Stand still until the background is done; returns the seconds."""
        assert self._beside.flight is not None
        waited = max(0.0, self._beside.flight.ends - self.now)
        self.now += waited
        self._land()
        return waited

    def _run(self, parts: Sequence[Part], streams: Sequence[int]) -> None:
        """One step in the foreground."""
        compute = self.costs.compute_seconds(self._load(parts))
        compute = self._beside.slowed(self.now, compute)
        verifying = [part.number for part in parts if part.phase == "verify"]
        swapping = [*verifying, *(number for number in streams if number not in verifying)]
        for number in swapping:
            request = self._requests[number]
            if request.link_left is None:
                request.link_left = request.swap_seconds
                self.result.swap_seconds += request.link_left
                self.result.swap_bytes += request.swap_bytes
                compute += self.copies * request.swap_bytes
        wait = sum(self._requests[number].link_left or 0.0 for number in verifying)
        seconds = self.costs.overlapped(compute, wait) if wait > 0 else compute
        self.result.exposed_seconds += seconds - compute
        self._remember(parts, swapping, seconds)
        left = seconds
        for number in swapping:
            request = self._requests[number]
            if request.link_left:
                moved = min(left, request.link_left)
                start = self.now + seconds - left
                self._tell(Span(number, "swap", start, start + moved))
                request.link_left, left = request.link_left - moved, left - moved
        if not swapping:
            self._step_seconds = compute
        for part in parts:
            self._tell(Span(part.number, part.phase, self.now, self.now + seconds, part.rows))
        self.now += seconds + self.between * len(parts)
        for part in parts:
            self._apply(part)

    def _load(self, parts: Sequence[Part]) -> StepLoad:
        blocks = []
        for part in parts:
            request = self._requests[part.number]
            own = request.draft_bytes if part.phase == "draft" else request.full_bytes
            pairs = part.rows * (own / request.token_bytes + part.rows / 2) if part.rows > 1 else 0.0
            blocks.append(Block(own, pairs))
        return StepLoad(sum(part.rows for part in parts), tuple(blocks))

    def _remember(self, parts: Sequence[Part], swapping: Sequence[int], seconds: float) -> None:
        held = sum(self._requests[request.number].device_bytes for request in self.scheduler.running)
        flying = [] if self._beside.flight is None else [self._beside.flight.number]
        held += sum(self._requests[number].swapping_bytes for number in [*swapping, *flying])
        self.result.peak_kv_bytes = max(self.result.peak_kv_bytes, held)
        phases = {part.phase for part in parts}
        if phases == {"draft"}:
            self.result.draft_steps.append(seconds)
        elif phases == {"draft", "verify"}:
            self.result.mixed_steps.append(seconds)
        elif phases == {"verify"}:
            self.result.verify_steps.append(seconds)

    def _apply(self, part: Part) -> None:
        request = self._requests[part.number]
        if part.phase == "prefill":
            request.prefill -= part.rows
            return
        if part.phase == "draft":
            request.draft(part.rows)
            return
        before = request.committed
        verdict = request.verify(part.rows)
        self.result.tokens += request.committed - before
        if request.first_token_at is None:
            request.first_token_at = self.now
            self.result.first_tokens.append(self.now - request.arrival)
        if verdict is None:
            return
        drafted, accepted, plain = verdict.asked, verdict.accepted, 1
        if verdict.speculated:
            self.result.proposed += drafted
            self.result.proposals_kept += accepted
            drafted, accepted, plain = 0, 0, accepted + 1  # nothing was drafted
        elif drafted:
            self.result.windows.append(drafted)
            self.result.accepted += accepted
        if request.controller is not None:
            request.controller.observe(drafted, accepted, self._prices(request), plain)
            request.next_round()

    def _prices(self, request: SimulatedRequest) -> tuple[float, ...]:
        found = self._pricer.prices(self._situation(request))
        return found if request.speculation is None else request.speculation.weigh(found)

    def _speculation_prices(self, request: SimulatedRequest) -> tuple[float, ...]:
        return self._pricer.speculation_prices(self._situation(request), MOST_PROPOSALS)

    def _situation(self, request: SimulatedRequest) -> Situation:
        running = self.scheduler.running
        swapping = sum(self._requests[other.number].mode == "offloaded" for other in running)
        return request.situation(max(1, len(running)), swapping, lockstep=self.lockstep)

    def _leave(self) -> int:
        gone = [request for request in self._requests.values() if request.finished]
        for request in gone:
            self.scheduler.remove(request.number)
            request.left()
            self.result.latencies.append(self.now - request.arrival)
            del self._requests[request.number]
        return len(gone)
