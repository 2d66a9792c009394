"""The staggered scheduler: while some requests draft, others have their full KV on the way, and a step carries both.

Every request that drafts holds a reservation of its next verify (see :mod:`vericache_core.runtime.rings`), made when
it starts and after every verify, near the window its controller wants. One that finds no place drafts on and tries
again at the next step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from vericache_core.runtime.admission import AdmissionPolicy, admit, check_acceptable
from vericache_core.runtime.rings import Rings
from vericache_core.runtime.rounds import MOST
from vericache_core.runtime.schedulable import NOTHING, Bytes, Part, Schedulable, StepPlan


class Roster:
    """Queue, running requests and byte budgets: what both schedulers have in common.

    Args:
        budget: bytes by tier.
        rows: most rows of a step.
        policy: limits of admission.

    Attributes:
        beside: whether a verify whose swap is long may run beside the steps of others.
        aside: device bytes of the budget that others than its requests hold.
    """

    beside, aside = True, 0.0

    def __init__(self, budget: Bytes | None = None, rows: int = 128, policy: AdmissionPolicy | None = None) -> None:
        self.budget, self.rows, self.policy = budget or Bytes(), rows, policy or AdmissionPolicy()
        self.waiting: list[Schedulable] = []
        self.running: list[Schedulable] = []
        self._served: dict[int, int] = {}
        self._streaming: dict[int, float] = {}
        self._steps = 0

    def submit(self, request: Schedulable) -> None:
        """See :class:`vericache_core.runtime.schedulable.Scheduler`."""
        check_acceptable(request, len(self.waiting), self.budget, self.policy)
        self.waiting.append(request)

    def remove(self, number: int) -> None:
        """See :class:`vericache_core.runtime.schedulable.Scheduler`."""
        self.waiting = [request for request in self.waiting if request.number != number]
        self.running = [request for request in self.running if request.number != number]
        self._served.pop(number, None)
        self._streaming.pop(number, None)

    @property
    def room(self) -> float:
        """Device bytes that running requests leave for swaps."""
        return self.budget.device - self.aside - sum((request.holds for request in self.running), NOTHING).device

    def admit(self, now: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Let requests in and out; returns numbers to start and to preempt."""
        if not self.waiting:
            return (), ()
        budget = self.budget - Bytes(self.aside, 0.0, 0.0)
        chosen = admit(self.waiting, self.running, budget, now, self.policy, self._streaming)
        known = {request.number: request for request in [*self.waiting, *self.running]}
        for number in chosen.preempt:
            self.remove(number)
            self.waiting.append(known[number])
        for number in chosen.start:
            self.remove(number)
            self.running.append(known[number])
        return chosen.start, chosen.preempt

    def fill(self, verifies: Sequence[Schedulable], singles: Sequence[Schedulable]) -> list[Part]:
        """Rows of one step: verifies, single rows, then prefills; who was served longest ago comes first.

        Single rows and prefills each keep a quarter of the step for themselves while they have use for it. A verify
        is never cut, because its full KV would have to be swapped in again.
        """
        prefills = [request for request in self.running if request.prefill]
        share = max(1, self.rows // 4)
        left = self.rows - (share if prefills else 0) - min(len(singles), share)
        parts: list[Part] = []
        for request in verifies:
            if request.drafts + 1 <= left or not parts:
                parts.append(Part(request.number, "verify", request.drafts + 1))
                left -= request.drafts + 1
        left = self.rows - sum(part.rows for part in parts) - (share if prefills else 0)
        chosen = self._longest_ago(singles)[: max(0, left)]
        parts += [Part(request.number, "draft" if wants_draft(request) else "decode", 1) for request in chosen]
        left = self.rows - sum(part.rows for part in parts)
        for request in self._longest_ago(prefills):
            if left > 0:
                parts.append(Part(request.number, "prefill", min(left, request.prefill)))
                left -= parts[-1].rows
        return parts

    @property
    def decoding(self) -> list[Schedulable]:
        """Running requests that may have rows, their prompts being there."""
        return [request for request in self.running if not (request.prefill or request.away)]

    def serve(self, plan: StepPlan) -> None:
        """Remember who had rows."""
        self._steps += 1
        for part in plan.parts:
            self._served[part.number] = self._steps

    def _longest_ago(self, requests: Sequence[Schedulable]) -> list[Schedulable]:
        return sorted(requests, key=lambda r: (-r.priority, self._served.get(r.number, 0), r.arrival, r.number))


def wants_draft(request: Schedulable) -> bool:
    """Whether its next row is a draft: it has a draft KV and anything to draft before a verify."""
    return request.drafting and min(request.window, request.most) > 0


class StaggeredScheduler(Roster):
    """See the module's docstring and :class:`vericache_core.runtime.schedulable.Scheduler`.

    Args:
        budget, rows, policy: as for the base.
        step_seconds: what a step takes, about; measured from then on.
    """

    def __init__(
        self,
        budget: Bytes | None = None,
        rows: int = 128,
        policy: AdmissionPolicy | None = None,
        step_seconds: float | None = None,
    ) -> None:
        super().__init__(budget, rows, policy)
        self.rings = Rings()
        self._step_seconds = self._planned_seconds = step_seconds or 0.0

    def remove(self, number: int) -> None:
        """See the base."""
        super().remove(number)
        self.rings.cancel(number)

    def plan(self, now: float) -> StepPlan:
        """See :class:`vericache_core.runtime.schedulable.Scheduler`."""
        start, preempt = self.admit(now)
        decoding = self.decoding
        self._reserve(decoding)
        due, singles = [], []
        for request in decoding:
            found = self.rings.get(request.number)
            if found is not None and found.verify <= self.rings.now and request.swapped_in:
                due.append(request)
            elif self._drafts_on(request):
                singles.append(request)
        due.sort(key=lambda request: (self.rings.get(request.number).start, request.number))  # type: ignore[union-attr]
        streams = self._streams(decoding)
        parts = self.fill(due, singles)
        if not parts and decoding:
            # Nothing to do but to wait for a swap: the most urgent one verifies as it streams in.
            request = self._most_urgent(decoding)
            self._streaming.setdefault(request.number, request.transient)
            streams = (request.number, *(number for number in streams if number != request.number))
            parts = [Part(request.number, "verify", request.drafts + 1)]
        return StepPlan(start, preempt, tuple(parts), streams)

    def done(self, plan: StepPlan, seconds: float) -> None:
        """See :class:`vericache_core.runtime.schedulable.Scheduler`."""
        self.serve(plan)
        verified = {part.number for part in plan.parts if part.phase == "verify"}
        for number in verified:
            self.rings.cancel(number)
            self._streaming.pop(number, None)
        for request in self.running:
            found = self.rings.get(request.number)
            if found is not None and found.verify <= self.rings.now:
                self.rings.postpone(request.number)
        if plan.parts:
            self._step_seconds = seconds if not self._step_seconds else 0.8 * self._step_seconds + 0.2 * seconds
        if not 0.7 <= self._planned_seconds / max(self._step_seconds, 1e-12) <= 1.4:
            # Steps have become shorter or longer: swaps that have not started are planned anew.
            self._planned_seconds = self._step_seconds
            for request in self.running:
                if request.number not in self._streaming:
                    self.rings.cancel(request.number)
        self.rings.advance()

    def _reserve(self, decoding: Sequence[Schedulable]) -> None:
        """Find a place for every verify that has none; in the order of the last service, until one finds none."""
        # As many verifies in a step as there are on average, so that they are spread evenly and no step is crowded.
        verifies = math.ceil(sum(1 / (request.window + 1) for request in decoding if wants_draft(request)))
        for request in self._longest_ago(decoding):
            swaps = request.link_seconds > 0
            if self.rings.get(request.number) is not None or not (wants_draft(request) or request.drafts or swaps):
                continue
            anchor = max(0, min(request.window, request.most) - request.drafts)
            found = self.rings.reserve(
                request.number,
                anchor,
                request.link_seconds,
                request.transient,
                # Before the first step its length is not known; a swap is then taken to fit into one.
                step=self._step_seconds or max(request.link_seconds, 1e-9),
                room=self.room,
                verifies=max(1, verifies),
            )
            if not found:
                break

    def _drafts_on(self, request: Schedulable) -> bool:
        """Whether a request that does not verify in this step has a row in it."""
        if request.link_seconds > 0 or request.drafts or wants_draft(request):
            return request.drafting and request.drafts < min(request.most, MOST) and request.window > 0
        return True  # plain, or pinned and for now not drafting

    def _streams(self, decoding: Sequence[Schedulable]) -> tuple[int, ...]:
        """Swaps under way and those that start now, by the step of their verify; never more bytes than there is room."""
        found = []
        for request in decoding:
            reservation = self.rings.get(request.number)
            if reservation is not None and request.link_seconds > 0 and reservation.start <= self.rings.now:
                found.append((request.number not in self._streaming, reservation.verify, request.number, request.transient))
        for fresh, _, number, nbytes in sorted(found):
            if fresh and sum(self._streaming.values()) + nbytes <= self.room:
                self._streaming[number] = nbytes
        return tuple(number for _, _, number, _ in sorted(found) if number in self._streaming)

    def _most_urgent(self, decoding: Sequence[Schedulable]) -> Schedulable:
        """Return the request whose swap is under way or would be next."""

        def urgency(request: Schedulable) -> tuple[bool, float, int]:
            found = self.rings.get(request.number)
            return request.number not in self._streaming, found.verify if found else float("inf"), request.number

        return min(decoding, key=urgency)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if budgets are exceeded or rings and requests disagree."""
        self.rings.check_integrity()
        numbers = [request.number for request in [*self.waiting, *self.running]]
        assert len(numbers) == len(set(numbers))
        assert set(self._streaming) <= {request.number for request in self.running}
        assert sum(self._streaming.values()) <= self.room or not self._streaming
        assert sum((request.holds for request in self.running), NOTHING).lacking(self.budget) is None
