"""The step loop: have a batch formed, run it, hand rows back.

All decisions here concern speed. Tokens come from :meth:`Request.take_rows` alone, which reads nothing
but logits that the full KV produced.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from vericache_core.cache.full import FullKV
from vericache_core.cache.ring import SwapRing
from vericache_core.errors import SwapError, VeriCacheError
from vericache_core.model.adapter import ModelAdapter
from vericache_core.runtime.background import BackgroundVerify, GiveWay
from vericache_core.runtime.batch import Batcher
from vericache_core.runtime.compress import Compression, PluginFailure
from vericache_core.runtime.link import LinkMeter
from vericache_core.runtime.observer import LoopObserver
from vericache_core.runtime.recover import Recovery
from vericache_core.runtime.request import Request
from vericache_core.runtime.reuse import PrefixReuse
from vericache_core.runtime.schedulable import Bytes, Scheduler, StepPlan
from vericache_core.runtime.segments import Segment
from vericache_core.runtime.ticket import Ticket
from vericache_core.runtime.tile import AttendFunction, Observer, StepFault, run_tile
from vericache_core.runtime.timeline import Span

MOST_IDLE = 1000
"""Plans in a row that may hold nothing to run, and nothing to wait for."""


class StepLoop:
    """Drives requests over one model.

    Args:
        adapter: the model.
        attend: fixed-block attention in use.
        ring: swap slots.
        scheduler: decides what each step carries.
        make_full: builds an empty full KV for a request that starts or is recomputed.
        holds: bytes of a request at its greatest length, by tier.
        fold: tail length at which ``Compressor.extend`` is called; 0 never.
        on_compressor_error: ``"plain"`` or ``"fail"``.
        on_swap_error: ``"recompute"`` or ``"fail"``.
        encode: text -> token ids, for compressors that need it.
        link_meter: learns how fast swaps come in.
        reuse: takes rows of earlier prompts out of a prefix store, when given.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        attend: AttendFunction,
        ring: SwapRing,
        scheduler: Scheduler,
        make_full: Callable[[Request], FullKV],
        holds: Callable[[Request], Bytes],
        fold: int,
        on_compressor_error: str = "plain",
        on_swap_error: str = "recompute",
        encode: Callable[[str], list[int]] | None = None,
        link_meter: LinkMeter | None = None,
        reuse: PrefixReuse | None = None,
    ) -> None:
        self.adapter, self.ring, self._attend = adapter, ring, attend
        self.link_meter = link_meter or LinkMeter()
        self.scheduler, self._holds, self._reuse = scheduler, holds, reuse
        self.background = BackgroundVerify()
        self.batcher = Batcher(adapter, ring, scheduler, lambda: not self.background.homeless, self.link_meter)
        made = None if reuse is None else reuse.keep_compressed
        self.compression = Compression(adapter, fold, encode, self._forward, made)
        self.recovery = Recovery(make_full, self.compression, on_compressor_error, on_swap_error)
        self.requests: list[Request] = []
        self.peak_device_kv_bytes = 0
        self.steps = 0
        self.swap_seconds = self.exposed_seconds = 0.0
        self._idle = 0
        self.observer = LoopObserver()

    def add(self, request: Request) -> None:
        """Take a request in; it runs as soon as the scheduler lets it.

        Raises:
            ConfigError, QueueFull: the scheduler refuses it.
        """
        self.scheduler.submit(self.ticket(request))
        self.compression.expect(request)
        self.requests.append(request)

    def ticket(self, request: Request) -> Ticket:
        """``request`` as the scheduler would see it from now on."""
        return Ticket(request, time.monotonic(), self._holds, self.batcher.transient, self._away)

    def _away(self, request: Request) -> bool:
        return request.number == self.background.number

    def settle(self) -> None:
        """Wait for what runs beside the steps, and take it in."""
        before = self.background.waited_seconds
        self._collect(block=True)
        self.exposed_seconds += self.background.waited_seconds - before

    def release(self, request: Request) -> None:
        """Let a request go with what it holds; :meth:`add` takes it in again."""
        if self.background.number == request.number:
            with request.full.aborted():  # its swap may be minutes from its end
                self.background.abandon()
        self.requests = [other for other in self.requests if other is not request]
        self.compression.forget(request.number)
        self.scheduler.remove(request.number)

    def remove(self, request: Request) -> None:
        """Let a request go, finished or not, and give its memory back."""
        self.release(request)
        request.close()
        if not self.requests:
            self.ring.trim()
        self.observer.removed(self)

    @property
    def live(self) -> list[Request]:
        """Requests that are in, wherever they are worked on."""
        return list(self.requests)

    def close(self) -> None:
        """Stop what runs beside the steps; requests must have gone."""
        self.background.abandon()

    @property
    def queued(self) -> int:
        """Requests that wait for a start."""
        return len(self.scheduler.waiting)

    def company(self) -> tuple[int, int]:
        """Requests that decode side by side, and those of them whose full KV is swapped."""
        decoding = [request for request in self.requests if request.full.tokens >= request.prompt_tokens]
        return len(decoding), sum(1 for request in decoding if request.full.offloaded)

    def step(self) -> list[Request]:
        """Run one step; returns the requests that finished in it (they are removed)."""
        self._collect(block=False)  # before the plan, which must not ask again for what a verdict has settled
        plan = self.scheduler.plan(time.monotonic())
        by_number = {request.number: request for request in self.requests}
        for number in plan.preempt:
            self._preempt(by_number[number])
        for number in plan.start:
            self._start(by_number[number])
        started = time.perf_counter()
        batch = self.batcher.form(plan, by_number, self.background.number)
        segments = batch.segments
        if batch.apart is not None:
            self.background.start(batch.apart, functools.partial(self._verify_alone, batch.apart))
        if not segments:
            self._idle = 0 if self.background.busy or plan.start or plan.preempt else self._idle + 1
            self.settle()
            if self._idle >= MOST_IDLE:
                self._end_standstill()
        else:
            self._idle = 0
            try:
                logits, ring_bytes = self._forward(segments, self.compression.observe)
            except StepFault as fault:
                self.recovery.step_failed(fault)
                plan = StepPlan(plan.start, plan.preempt, (), plan.streams)
            else:
                self._hand_out(segments, logits, started, time.perf_counter(), ring_bytes)
        seconds = time.perf_counter() - started
        self.batcher.ran(batch, seconds)
        self.scheduler.done(plan, seconds)
        self.observer.stepped(self)
        finished = [request for request in self.requests if request.finished]
        for request in finished:
            request.metrics.new_tokens = len(request.generated)
            request.metrics.swap_bytes += request.full.moved_bytes
            request.metrics.offload_bytes += request.full.offloaded_bytes
            self.remove(request)
        return finished

    def _start(self, request: Request) -> None:
        request.full.make_room(request.greatest_length)
        if self._reuse is None:
            return
        try:
            self._reuse.load(request, self.compression)
        except SwapError as error:
            self.recovery.step_failed(StepFault(request, error))
        if request.prefix_only:  # all of it may have come, and no step of its own will follow
            self._compress(request)

    def _end_standstill(self) -> None:
        """Fail a request rather than wait for ever: a scheduler that finds nothing to run is at fault, not the caller."""
        self._idle = 0
        request = self.requests[0]
        request.fail(VeriCacheError("the scheduler finds nothing to run", cause=f"{len(self.requests)} requests are left"))

    def _verify_alone(self, segment: Segment[Request], give_way: GiveWay) -> Tensor:
        full = segment.request.full
        self._open_full([segment])  # whoever started it closes it again
        observe = self.compression.observe
        return run_tile(
            self.adapter, [segment], self._attend, observe, lambda layer: give_way(full.arriving(layer)), graphs=False
        )

    def _collect(self, *, block: bool) -> None:
        verdict = self.background.collect(block=block)
        if verdict is None:
            return
        request = verdict.segment.request
        if request.finished:
            return
        if verdict.logits is None:
            assert verdict.fault is not None
            self.recovery.step_failed(verdict.fault)
        else:
            segments = [verdict.segment]
            self._hand_out(segments, verdict.logits, verdict.started, verdict.ended, self.ring.nbytes, background=True)

    def _preempt(self, request: Request) -> None:
        """Take everything from a request that goes back to the queue; what it has committed it keeps, exactly."""
        if self.background.number == request.number:
            self._collect(block=True)
        request.metrics.preemptions += 1
        self.recovery.start_over(request)

    def _forward(self, segments: Sequence[Segment[Request]], observe: Observer) -> tuple[Tensor, int]:
        """One model step over ``segments``; ``(logits [rows, vocab], bytes of ring slots, in use or kept for reuse)``."""
        authoritative = [segment for segment in segments if segment.want.phase != "draft"]
        try:
            self._open_full(authoritative)
            logits = run_tile(self.adapter, segments, self._attend, observe, lambda _: self.background.advance())
            return logits, self.ring.nbytes
        finally:
            for segment in authoritative:
                segment.request.full.close_step()

    def _open_full(self, segments: Sequence[Segment[Request]]) -> None:
        for segment in segments:
            try:
                segment.request.full.open(segment.count, segment.request.draft)
            except SwapError as error:
                raise StepFault(segment.request, error) from error

    def _hand_out(
        self,
        segments: Sequence[Segment[Request]],
        logits: Tensor,
        started: float,
        ended: float,
        ring_bytes: int,
        *,
        background: bool = False,
    ) -> None:
        self.steps += 1
        for segment in segments:
            request = segment.request
            self._count_swap(request)
            request.metrics.steps += 1
            request.metrics.add_seconds(segment.want.phase, ended - started)
            self.observer.happened(Span(request.number, segment.want.phase, started, ended, segment.count, background))
            held = request.device_bytes() + (ring_bytes if request.full.offloaded else 0)
            request.metrics.peak_device_kv_bytes = max(request.metrics.peak_device_kv_bytes, held)
        total = sum(request.device_bytes() for request in self.requests) + ring_bytes
        self.peak_device_kv_bytes = max(self.peak_device_kv_bytes, total)
        for segment in segments:
            try:
                self._hand_rows(segment, logits[segment.first : segment.first + segment.count])
            except VeriCacheError as error:
                segment.request.fail(error)

    def _count_swap(self, request: Request) -> None:
        """Add up link time; what the thread of the steps waited for it was not hidden."""
        full = request.full
        now = full.link_seconds, full.link_bytes, full.waited_seconds
        link, nbytes, waited = (after - before for after, before in zip(now, request.link_counted, strict=True))
        request.link_counted = now
        self.link_meter.observe(full.tier, nbytes, link)
        self.swap_seconds += link
        request.metrics.swap_seconds += link
        self.exposed_seconds += waited
        if link:  # a draft step loads nothing, and finds those of the last verify
            for layer, began, done in full.loads:
                self.observer.happened(Span(request.number, "swap", began, done, layer=layer))

    def _hand_rows(self, segment: Segment[Request], logits: Tensor) -> None:
        request = segment.request
        if segment.want.phase == "draft":
            request.take_drafts(logits)
            return
        kept = request.take_rows(segment.want, segment.count, logits)
        request.metrics.prefilled += kept if segment.want.phase == "prefill" else 0
        if self._reuse is not None:
            self._reuse.keep(request, kept)
        request.full.advance(kept)
        request.metrics.full_kv_bytes = sum(layer.token_bytes for layer in self.adapter.layers) * request.full.tokens
        if request.draft is not None:
            request.draft.accept(kept)
        if not request.finished:
            self._compress(request)

    def _compress(self, request: Request) -> None:
        try:
            self.compression.update(request)
        except PluginFailure as failure:
            self.recovery.compressor_failed(request, failure.where, failure.error)
