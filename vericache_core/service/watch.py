"""Feeds metrics from the counters that an engine keeps anyway: looks at them after every step and counts what is new."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from vericache_core.runtime.observer import LoopObserver
from vericache_core.service.metrics import Metrics
from vericache_core.service.stores import StoreCollector

if TYPE_CHECKING:
    from vericache_core.engine import Engine
    from vericache_core.runtime.loop import StepLoop
    from vericache_core.runtime.request import Request


@dataclass(slots=True)
class _Counted:
    """What of a request is in the metrics already."""

    latest: float
    rounds: int = 0
    verify_seconds: float = 0.0
    compress_seconds: float = 0.0
    swap_bytes: int = 0
    swap_seconds: float = 0.0
    offload_bytes: int = 0
    prefilled: int = 0
    prefix_tokens_loaded: int = 0
    tokens: int = 0
    near_ties: int = 0


class EngineWatch(LoopObserver):
    """Observer of one engine's loop; see :meth:`attach`.

    Args:
        metrics: to feed.
        clock: the one that arrivals are stamped with.
    """

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self.metrics, self._clock = metrics, clock
        self._counted: WeakKeyDictionary[Request, _Counted] = WeakKeyDictionary()

    @classmethod
    def attach(cls, engine: Engine, metrics: Metrics) -> EngineWatch:
        """Watch ``engine`` from its next step on, in place of whatever watched it before."""
        watch = cls(metrics)
        engine.loop.observer = watch
        if engine.audit is not None:
            engine.audit.metrics = metrics
        if engine.reuse is not None:
            metrics.registry.register(StoreCollector(engine.reuse))
        return watch

    def stepped(self, loop: StepLoop) -> None:
        now = self._clock()
        arrivals = {ticket.number: ticket.arrival for ticket in (*loop.scheduler.running, *loop.scheduler.waiting)}
        for request in loop.live:
            if request not in self._counted:
                self._counted[request] = _Counted(arrivals.get(request.number, now))
            self._count(request, self._counted[request], now)
        self._weigh(loop)

    def removed(self, loop: StepLoop) -> None:
        self._weigh(loop)

    def _count(self, request: Request, counted: _Counted, now: float) -> None:
        have, name, metrics = request.metrics, request.metrics.compressor, self.metrics
        for drafted, accepted in zip(
            have.drafted_per_round[counted.rounds :], have.accepted_per_round[counted.rounds :], strict=True
        ):
            metrics.count_round(name, drafted, accepted)
        counted.rounds = have.rounds
        verify, compress = have.seconds.get("verify", 0.0), have.seconds.get("compress", 0.0)
        if verify > counted.verify_seconds:
            metrics.time_verify(name, verify - counted.verify_seconds)
            counted.verify_seconds = verify
        if compress > counted.compress_seconds:
            metrics.time_compress(name, compress - counted.compress_seconds)
            counted.compress_seconds = compress
        if have.swap_seconds > counted.swap_seconds:  # it is counted when its verify ends, and bytes with it
            moved = have.swap_bytes + request.full.moved_bytes  # the first is of full KV that was given up
            metrics.count_swap(moved - counted.swap_bytes, have.swap_seconds - counted.swap_seconds)
            counted.swap_bytes, counted.swap_seconds = moved, have.swap_seconds
        offloaded = have.offload_bytes + request.full.offloaded_bytes
        if offloaded > counted.offload_bytes:
            metrics.count_offload(offloaded - counted.offload_bytes)
            counted.offload_bytes = offloaded
        if have.prefilled > counted.prefilled:
            metrics.count_prompt("computed", have.prefilled - counted.prefilled)
            counted.prefilled = have.prefilled
        if have.prefix_tokens_loaded > counted.prefix_tokens_loaded:
            metrics.count_prompt("store", have.prefix_tokens_loaded - counted.prefix_tokens_loaded)
            counted.prefix_tokens_loaded = have.prefix_tokens_loaded
        if have.near_ties > counted.near_ties:
            metrics.count_near_ties(name, have.near_ties - counted.near_ties)
            counted.near_ties = have.near_ties
        fresh = len(request.generated) - counted.tokens
        if fresh:
            if not counted.tokens:
                metrics.time_first_token(name, now - counted.latest)
                fresh -= 1  # what comes along with the first token took no time of its own
                counted.tokens, counted.latest = 1, now
            if fresh:
                metrics.time_tokens(name, fresh, now - counted.latest)
            counted.tokens, counted.latest = counted.tokens + fresh, now

    def _weigh(self, loop: StepLoop) -> None:
        requests, set_bytes = loop.live, self.metrics.set_kv_bytes
        set_bytes("full", "device", sum(request.full.device_bytes for request in requests) + loop.ring.nbytes)
        set_bytes("draft", "device", sum(0 if r.draft is None else r.draft.device_bytes for r in requests))
        tiers = {"device": 0, "host": 0, "disk": 0}
        for request in requests:
            tiers[request.full.tier] += request.full.tier_bytes
        set_bytes("full", "host", tiers["host"])
        set_bytes("full", "disk", tiers["disk"])
