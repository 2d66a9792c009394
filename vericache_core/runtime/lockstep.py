"""The naive reference beside the staggered scheduler: all requests draft, then all requests verify."""

from __future__ import annotations

from vericache_core.runtime.admission import AdmissionPolicy
from vericache_core.runtime.schedulable import Bytes, StepPlan
from vericache_core.runtime.scheduler import Roster, wants_draft


class LockstepScheduler(Roster):
    """See the module's docstring and :class:`vericache_core.runtime.schedulable.Scheduler`.

    Swaps start with the verify, and the full KV of as many requests as have room is on the device at once; the
    others verify in the steps that follow. A swap hides behind the step that verifies and no other: what the staggered
    scheduler gains is measured against that.
    """

    beside = False

    def __init__(self, budget: Bytes | None = None, rows: int = 128, policy: AdmissionPolicy | None = None) -> None:
        super().__init__(budget, rows, policy)
        self._to_verify: set[int] = set()

    def remove(self, number: int) -> None:
        """See the base."""
        super().remove(number)
        self._to_verify.discard(number)

    def plan(self, now: float) -> StepPlan:
        """See :class:`vericache_core.runtime.schedulable.Scheduler`."""
        start, preempt = self.admit(now)
        decoding = self.decoding
        plain = [request for request in decoding if not (request.link_seconds or request.drafts or wants_draft(request))]
        rounds = [request for request in decoding if request not in plain]
        if not self._to_verify:
            drafting = [request for request in rounds if request.drafts < min(request.window, request.most)]
            if drafting:
                return StepPlan(start, preempt, tuple(self.fill([], [*plain, *drafting])))
            self._to_verify = {request.number for request in rounds}
        fitting, left = [], self.room
        for request in sorted(rounds, key=lambda request: request.number):
            if request.number in self._to_verify and request.transient <= left:
                fitting.append(request)
                left -= request.transient
        parts = self.fill(fitting, plain)
        return StepPlan(start, preempt, tuple(parts), tuple(part.number for part in parts if part.phase == "verify"))

    def done(self, plan: StepPlan, seconds: float) -> None:
        """See :class:`vericache_core.runtime.schedulable.Scheduler`."""
        self.serve(plan)
        self._to_verify -= {part.number for part in plan.parts if part.phase == "verify"}
