"""An engine whose prefill and decoding can be timed apart.

All that the benchmark knows about the inside of the engine is in this file: a request is driven through its prefill
alone, held out of the loop, and put back when the clock starts. Rows of a prefill that was done before are copied in,
which history independence makes exact.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from vericache_core.bench.runs import KeptKV, copy_prefix
from vericache_core.bench.throughput.measured import Trace
from vericache_core.bench.throughput.workloads import Prompt
from vericache_core.cache.full import FullKV
from vericache_core.config import EngineConfig
from vericache_core.engine import Engine
from vericache_core.errors import CompressorFault
from vericache_core.plugins.registry import Registry
from vericache_core.runtime.admission import held
from vericache_core.runtime.request import Request, Want
from vericache_core.runtime.sampling_params import SamplingParams
from vericache_core.runtime.segments import Segment
from vericache_core.runtime.tile import run_tile


@dataclass
class Link:
    """The way from the slower tier to the device: how fast it may be, and what happened on it.

    Attributes:
        bytes_per_second: limit; ``None`` for as fast as it goes.
        swaps: ``(from, to, full KV)`` of each layer that came in.
        waited: seconds in which decoding stood still for a layer, as the loop counts them.
    """

    bytes_per_second: float | None = None
    swaps: list[tuple[float, float, FullKV]] = field(default_factory=list)
    waited: float = 0.0

    def reset(self) -> None:
        self.swaps.clear()
        self.waited = 0.0

    def hidden_fraction(self) -> float | None:
        """Share of the swaps' time in which no step waited; ``None`` without swaps."""
        busy = sum(end - start for start, end, _ in self.swaps)
        return max(0.0, 1.0 - self.waited / busy) if busy else None


class WatchedKV(FullKV):
    """Full KV whose swaps are timed and held back to the speed of the link. Writes are not held back."""

    link: Link

    def _fill(self, *args: Any, **kwargs: Any) -> None:
        started, before = time.perf_counter(), self.moved_bytes
        super()._fill(*args, **kwargs)
        if self.link.bytes_per_second is not None:
            due = started + (self.moved_bytes - before) / self.link.bytes_per_second
            time.sleep(max(0.0, due - time.perf_counter()))
        self.link.swaps.append((started, time.perf_counter(), self))


@dataclass
class Decoded:
    """What decoding took."""

    seconds: float
    tokens: int
    steps: int
    peak_device_bytes: int
    trace: Trace


class HeldEngine(Engine):
    """An engine with a clock around decoding; see the module docstring."""

    def __init__(self, model: Any, tokenizer: Any, config: EngineConfig, registry: Registry | None, link: Link) -> None:
        self.link = link
        super().__init__(model, tokenizer, config, registry)

    def _full_kv(self, *args: Any, **kwargs: Any) -> FullKV:
        full = super()._full_kv(*args, **kwargs)
        # The same object under another class: where its rows live is the engine's decision, not ours.
        full.__class__ = WatchedKV
        assert isinstance(full, WatchedKV)
        full.link = self.link
        return full

    def prefill(self, prompt: Prompt) -> KeptKV:
        """The rows of a prompt on the device, to be copied from; ``free()`` ends them."""
        request = self._request(list(prompt.token_ids), SamplingParams(max_new_tokens=1, ignore_eos=True), None, False)
        full: FullKV = request.full
        full.__class__ = KeptKV
        assert isinstance(full, KeptKV)
        try:
            self._run_alone(request, lambda: request.finished)
        except BaseException:
            full.free()
            raise
        return full

    def build(self, prompt: Prompt, new_tokens: int, compressor: str | None, company: int) -> Request:
        """A request, one of ``company``, that has computed nothing yet."""
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
        return self._request(list(prompt.token_ids), params, compressor, False, company)

    def begin(self, request: Request, source: FullKV | None) -> None:
        """Prefill: it then has its first token, and its compressed KV if it drafts; the loop does not know it."""
        needs = None if request.compressor is None else request.compressor.needs
        if source is not None and not (needs is not None and needs.attention_mass):
            copy_prefix(source, request.full, request.prompt_tokens - max(1, 0 if needs is None else needs.queries))
        self._run_alone(request, lambda: bool(request.generated) or request.finished)

    def fits(self, request: Request, running: Sequence[Request]) -> bool:
        """Whether the engine would let ``request`` run beside ``running``."""
        tickets = [self.loop.ticket(other) for other in (*running, request)]
        return held(tickets).lacking(self.planner.scheduler.budget) is None

    def drop(self, request: Request) -> None:
        """Give back what a request holds."""
        self._drop(request)

    def _run_alone(self, request: Request, done: Callable[[], bool]) -> None:
        self.loop.add(request)
        try:
            while not done():
                self.loop.step()
        finally:
            self.loop.release(request)
        if request.error is not None:
            raise request.error

    def decode(self, requests: Sequence[Request], begin: Callable[[Request], None]) -> Decoded:
        """Decode ``requests`` to their ends: as many at a time as fit, the next as soon as there is room for it.

        ``begin`` prefills one. The clock stands meanwhile, and a swap that is under way then is waited for before it does.

        Raises:
            VeriCacheError: a request failed.
        """
        clock, waiting, running = _Clock(), deque(requests), list[Request]()
        watch, steps, first, outside = _Watch(self.link, clock), 0, 0, 0.0
        self.link.reset()
        self.loop.peak_device_kv_bytes = 0
        exposed = self.loop.exposed_seconds
        while waiting or running:
            while waiting and (not running or self.fits(waiting[0], running)):
                self.loop.settle()
                clock.stop()
                before, swaps = self.loop.exposed_seconds, len(self.link.swaps)
                for request in running:  # nobody gains a token while the clock stands
                    self.loop.release(request)
                begin(waiting[0])
                for request in running:
                    self.loop.add(request)
                outside += self.loop.exposed_seconds - before
                del self.link.swaps[swaps:]
                first += len(waiting[0].generated)
                running.append(waiting.popleft())
                self.loop.add(running[-1])
                watch.add(running[-1])
            clock.go()
            earlier = clock.seconds
            self.loop.step()
            steps += 1
            watch.after_step(earlier, clock.seconds, self.loop.ring.nbytes)
            for request in running:
                if request.error is not None:
                    raise request.error
            running = [request for request in running if not request.finished]
        clock.stop()
        self.link.waited = self.loop.exposed_seconds - exposed - outside
        watch.add_swaps()
        tokens = sum(len(request.generated) for request in requests) - first
        return Decoded(clock.seconds, tokens, steps, self.loop.peak_device_kv_bytes, watch.trace)

    def draft_only(self, requests: Sequence[Request]) -> Decoded:
        """Let held requests draft all their tokens, which nobody verifies: what a compressor alone would give.

        Raises:
            CompressorFault: a request has no compressed KV.
        """
        clock = _Clock()
        watch, steps = _Watch(self.link, clock), 0
        for request in requests:
            watch.add(request)
        clock.go()
        while waiting := [r for r in requests if len(r.generated) + len(r.drafts) < r.params.max_new_tokens]:
            for first in range(0, len(waiting), self.adapter.rows):
                earlier = clock.seconds
                self._draft(waiting[first : first + self.adapter.rows])
                steps, now = steps + 1, clock.seconds
                for request in waiting[first : first + self.adapter.rows]:
                    request.metrics.add_seconds("draft", now - earlier)
                watch.after_step(earlier, now, 0)
        clock.stop()
        peak = max((device for _, device, _, _ in watch.trace.memory), default=0)
        return Decoded(clock.seconds, sum(len(request.drafts) for request in requests), steps, peak, watch.trace)

    def _draft(self, requests: Sequence[Request]) -> None:
        """One step with a draft row of each request."""
        segments = []
        for row, request in enumerate(requests):
            if request.draft is None:
                raise CompressorFault("nothing was compressed", cause="; ".join(request.metrics.degraded) or None)
            newest = request.drafts[-1] if request.drafts else request.tokens[-1]
            segments.append(Segment(request, Want("draft", (newest,), request.draft.tokens), row, 1))
        logits = run_tile(self.adapter, segments, self.attend, lambda *_: None)
        for row, request in enumerate(requests):
            request.take_draft(logits[row])


class _Clock:
    """Seconds of decoding: it can be stopped."""

    def __init__(self) -> None:
        self._pieces: list[tuple[float, float]] = []  # (moment on the machine's clock, seconds counted until then)
        self._since: float | None = None
        self._before = 0.0

    @property
    def seconds(self) -> float:
        return self._before + (0.0 if self._since is None else time.perf_counter() - self._since)

    def go(self) -> None:
        if self._since is None:
            self._since = time.perf_counter()
            self._pieces.append((self._since, self._before))

    def stop(self) -> None:
        self._before, self._since = self.seconds, None

    def when(self, moment: float) -> float:
        """Seconds counted at a ``moment`` of the machine's clock at which this one ran."""
        since, before = next(piece for piece in reversed(self._pieces) if piece[0] <= moment)
        return before + moment - since


class _Watch:
    """Finds out after each step who was in it, from the counters that requests keep anyway."""

    def __init__(self, link: Link, clock: _Clock) -> None:
        self._link, self._clock, self.trace = link, clock, Trace()
        self._requests: list[Request] = []
        self._seconds: list[dict[str, float]] = []
        self._rounds: list[int] = []
        self._numbers: dict[int, int] = {}

    def add(self, request: Request) -> None:
        """Watch ``request`` from now on."""
        self._numbers[id(request.full)] = len(self._requests)
        self._requests.append(request)
        self._seconds.append(dict(request.metrics.seconds))
        self._rounds.append(request.metrics.rounds)

    def after_step(self, start: float, end: float, ring_bytes: int) -> None:
        device, tiers = ring_bytes, {"device": 0, "host": 0, "disk": 0}
        for number, request in enumerate(self._requests):
            seconds = request.metrics.seconds
            for phase, total in seconds.items():
                if phase != "compress" and total != self._seconds[number].get(phase, 0.0):
                    self.trace.phases.append((start, end, number, phase))
            self._seconds[number] = dict(seconds)
            if request.metrics.rounds != self._rounds[number]:
                self._rounds[number] = request.metrics.rounds
                drafted, accepted = request.metrics.drafted_per_round[-1], request.metrics.accepted_per_round[-1]
                self.trace.windows.append((end, number, drafted, accepted))
            device += request.device_bytes()
            tiers[request.full.tier] += request.full.tier_bytes
        self.trace.memory.append((end, device, tiers["host"], tiers["disk"]))

    def add_swaps(self) -> None:
        for start, end, full in self._link.swaps:
            if id(full) in self._numbers:
                self.trace.swaps.append((self._clock.when(start), self._clock.when(end), self._numbers[id(full)]))
