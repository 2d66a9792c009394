"""The batch of a step: which rows of which requests it carries, and which verify runs beside it.

A scheduler plans with what it knew; here that is cut to the rows and the device bytes that there are.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from vericache_core.cache.ring import SwapRing, ring_rows
from vericache_core.model.adapter import ModelAdapter
from vericache_core.runtime.link import LinkMeter
from vericache_core.runtime.request import Request
from vericache_core.runtime.schedulable import Scheduler, StepPlan
from vericache_core.runtime.segments import Segment

RECENT: Final = 9
"""Steps that say how long a step takes."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Segments of a step, side by side, and the verify that is to run beside the steps from now on, if there is one."""

    segments: list[Segment[Request]]
    apart: Segment[Request] | None = None


class Batcher:
    """Forms batches.

    Args:
        adapter: the model.
        ring: swap slots, a few for each request that swaps in a step.
        scheduler: whose budget the slots have to fit into, and who says whether verifies may run beside steps.
        apart: whether a verify may run beside the steps, asked before one is put apart.
        link_meter: how fast swaps come in.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        ring: SwapRing,
        scheduler: Scheduler,
        apart: Callable[[], bool],
        link_meter: LinkMeter,
    ) -> None:
        self._adapter, self._ring, self._scheduler = adapter, ring, scheduler
        self._apart, self._link_meter = apart, link_meter
        self._steps_without_swap: deque[float] = deque(maxlen=RECENT)

    def form(self, plan: StepPlan, by_number: Mapping[int, Request], flying: int | None) -> Batch:
        """The batch of a step; a block that does not fit is cut, and asked for again later.

        Each request that swaps takes ring slots for the whole step. Those that the device has no room for beside the
        first wait for another step. A verify whose swap would hold up the others is put apart, one at a time, and
        whoever else is due drafts on meanwhile.

        Args:
            plan: by the scheduler.
            by_number: the requests that the plan names.
            flying: number of the request whose verify runs beside the steps already.
        """
        segments: list[Segment[Request]] = []
        apart: Segment[Request] | None = None
        first = 0
        room, slots = self._ring_room(), 0.0
        if flying is not None:
            slots = self.transient(by_number[flying])
        for part in plan.parts:
            request, phase = by_number[part.number], part.phase
            if request.finished or part.number == flying or request.full.tokens == len(request.tokens):
                continue
            long = phase != "draft" and self._swaps_long(request)
            if long and (flying is not None or apart is not None):
                # The link is taken: a second swap would only make both late.
                if not request.may_draft_on():
                    continue
                long, phase = False, "draft"
            needed = 0.0 if phase == "draft" else self.transient(request)
            if slots and needed and slots + needed > room:
                continue
            slots += needed
            want = request.want(phase)
            if long and len(want.tokens) <= self._adapter.most_rows:
                apart = Segment(request, want, 0, len(want.tokens))
                continue
            # Rows that a prefix store gave after the plan was made need not be computed.
            rows = min(part.rows, len(want.tokens)) if want.phase == "prefill" else len(want.tokens)
            count = min(rows, self._adapter.most_rows - first)
            if count > 0:
                segments.append(Segment(request, want, first, count))
                first += count
        if self._ring.nbytes + slots > room:
            self._ring.trim()  # slots are kept for reuse, and requests that came since may need the room
        if apart is not None and not segments:  # there is nobody to hold up
            return Batch([apart])
        return Batch(segments, apart)

    def ran(self, batch: Batch, seconds: float) -> None:
        """A step with the segments of ``batch`` took ``seconds``."""
        segments = batch.segments
        if segments and not any(part.want.phase != "draft" and part.request.full.offloaded for part in segments):
            self._steps_without_swap.append(seconds)

    def transient(self, request: Request) -> float:
        """Device bytes of the ring slots that a step of this request takes."""
        if not request.full.offloaded:
            return 0.0
        largest = max(self._adapter.layers[index].token_bytes for index in request.full.offloaded)
        return float(self._ring.layers * largest * ring_rows(request.greatest_length))

    def _ring_room(self) -> float:
        """Device bytes that the budget leaves for ring slots while every running request is at its greatest length."""
        if self._scheduler.budget.device == float("inf"):
            return float("inf")
        return self._scheduler.budget.device - sum(ticket.holds.device for ticket in self._scheduler.running)

    def _swaps_long(self, request: Request) -> bool:
        """Whether its next swap takes longer than a step that swaps nothing, and may run beside others."""
        rate = self._link_meter.seconds_per_byte(request.full.tier)
        if (
            request.draft is None
            or not request.full.offloaded
            or rate is None
            or not (self._scheduler.beside and self._apart())
        ):
            return False
        # The median: a step in which a kernel was compiled says nothing of the next one.
        recent = self._steps_without_swap
        return bool(recent) and rate * self._swap_bytes(request) > statistics.median(recent)

    def _swap_bytes(self, request: Request) -> float:
        """Bytes of one swap of ``request``: the mean of those that were, and at first all of its offloaded rows."""
        if request.metrics.rounds:
            return (request.full.moved_bytes - request.swapped_before) / request.metrics.rounds
        offloaded = request.full.offloaded
        return float(request.full.tokens * sum(self._adapter.layers[index].token_bytes for index in offloaded))
