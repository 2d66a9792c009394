"""An engine whose prefill and decoding can be timed apart.

All that the benchmark knows about the inside of the engine is in this file: a request is driven through its prefill
alone, held out of the loop, and put back when the clock starts. Rows of a prefill that was done before are copied in,
which history independence makes exact.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vericache_core.bench.runs import KeptKV, copy_prefix
from vericache_core.bench.throughput.measured import Trace
from vericache_core.bench.throughput.workloads import Prompt
from vericache_core.cache.full import FullKV
from vericache_core.cache.ring import RingPeak
from vericache_core.engine import Engine
from vericache_core.errors import CompressorFault
from vericache_core.runtime.admission import held
from vericache_core.runtime.observer import LoopObserver
from vericache_core.runtime.request import Request, Want
from vericache_core.runtime.sampling_params import SamplingParams
from vericache_core.runtime.segments import Segment
from vericache_core.runtime.tile import run_tile
from vericache_core.runtime.timeline import Span


@dataclass
class Decoded:
    """What decoding took.

    Attributes:
        swap_seconds: in which the link was busy, and ``exposed_seconds`` in which decoding stood still for it.
        peak_device_bytes: the most KV on the device, and ``ring`` the most that ring slots took, in a step of decoding.
    """

    seconds: float
    tokens: int
    steps: int
    peak_device_bytes: int
    trace: Trace
    ring: RingPeak
    swap_seconds: float = 0.0
    exposed_seconds: float = 0.0

    @property
    def hidden_fraction(self) -> float | None:
        """Share of the swaps' time in which no step waited; ``None`` without swaps."""
        return max(0.0, 1.0 - self.exposed_seconds / self.swap_seconds) if self.swap_seconds else None


class HeldEngine(Engine):
    """An engine with a clock around decoding; see the module docstring."""

    def prefill(self, prompt: Prompt) -> KeptKV:
        """The rows of a prompt on the device, to be copied from; ``free()`` ends them."""
        params = SamplingParams(max_new_tokens=1, ignore_eos=True)
        self.builder.check_length(len(prompt.token_ids), params)
        full = self.builder.make_full_kv(None, "device", KeptKV)
        assert isinstance(full, KeptKV)
        request = self.builder.make_request(prompt.token_ids, params, full)
        try:
            self._run_alone(request, lambda: request.finished)
        except BaseException:
            full.free()
            raise
        return full

    def build(self, prompt: Prompt, new_tokens: int, compressor: str | None, company: int) -> Request:
        """A request, one of ``company``, that has computed nothing yet."""
        params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
        return self.builder.for_prompt(list(prompt.token_ids), params, compressor, company=company)

    def begin(self, request: Request, source: FullKV) -> None:
        """Prefill, from the rows of ``source`` where they do.

        The request then has its first token, and its compressed KV if it drafts; the loop does not know it.
        """
        needs = None if request.compressor is None else request.compressor.needs
        if needs is None or not needs.attention_mass:
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
        loop, clock, waiting, running = self.loop, _Clock(), deque(requests), list[Request]()
        watch, steps, first = _Watch(clock), 0, 0
        loop.peak_device_kv_bytes, loop.ring.peak = 0, RingPeak()
        linked, exposed = loop.swap_seconds, loop.exposed_seconds
        before, loop.observer = loop.observer, watch
        try:
            while waiting or running:
                while waiting and (not running or self.fits(waiting[0], running)):
                    loop.settle()
                    clock.stop()
                    outside, peaks = (loop.swap_seconds, loop.exposed_seconds), (loop.peak_device_kv_bytes, loop.ring.peak)
                    for request in running:  # nobody gains a token while the clock stands
                        loop.release(request)
                    begin(waiting[0])
                    for request in running:
                        loop.add(request)
                    linked += loop.swap_seconds - outside[0]
                    exposed += loop.exposed_seconds - outside[1]
                    # What a prefill took most is none of decoding; slots that it leaves for reuse are, as in any engine.
                    loop.peak_device_kv_bytes, loop.ring.peak = peaks
                    first += len(waiting[0].generated)
                    running.append(waiting.popleft())
                    loop.add(running[-1])
                    watch.add(running[-1])
                clock.go()
                loop.step()
                steps += 1
                watch.after_step(clock.seconds, loop.ring.nbytes)
                for request in running:
                    if request.error is not None:
                        raise request.error
                running = [request for request in running if not request.finished]
        finally:
            loop.observer = before
        clock.stop()
        tokens = sum(len(request.generated) for request in requests) - first
        return Decoded(
            clock.seconds,
            tokens,
            steps,
            loop.peak_device_kv_bytes,
            watch.trace,
            loop.ring.peak,
            loop.swap_seconds - linked,
            loop.exposed_seconds - exposed,
        )

    def draft_only(self, requests: Sequence[Request]) -> Decoded:
        """Let held requests draft all their tokens, which nobody verifies: what a compressor alone would give.

        Raises:
            CompressorFault: a request has no compressed KV.
        """
        clock = _Clock()
        watch, steps = _Watch(clock), 0
        for request in requests:
            watch.add(request)
        clock.go()
        while waiting := [r for r in requests if len(r.generated) + len(r.drafts) < r.params.max_new_tokens]:
            for first in range(0, len(waiting), self.adapter.rows):
                started = time.perf_counter()
                self._draft(waiting[first : first + self.adapter.rows])
                steps, ended = steps + 1, time.perf_counter()
                for request in waiting[first : first + self.adapter.rows]:
                    watch.happened(Span(request.number, "draft", started, ended, 1))
                watch.after_step(clock.seconds, 0)
        clock.stop()
        peak = max((device for _, device, _, _ in watch.trace.memory), default=0)
        return Decoded(clock.seconds, sum(len(request.drafts) for request in requests), steps, peak, watch.trace, RingPeak())

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

    @property
    def runs(self) -> bool:
        return self._since is not None

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


class _Watch(LoopObserver):
    """Puts into a trace what the loop tells of its requests, and what they hold after each step."""

    def __init__(self, clock: _Clock) -> None:
        self._clock, self.trace = clock, Trace()
        self._requests: list[Request] = []
        self._rounds: list[int] = []
        self._places: dict[int, int] = {}

    def add(self, request: Request) -> None:
        """Watch ``request`` from now on."""
        self._places[request.number] = len(self._requests)
        self._requests.append(request)
        self._rounds.append(request.metrics.rounds)

    def happened(self, span: Span) -> None:
        """See the base; what happens while the clock stands belongs to no run."""
        place = self._places.get(span.number)
        if place is None or not self._clock.runs:
            return
        start, end = self._clock.when(span.start), self._clock.when(span.end)
        if span.kind == "swap":
            self.trace.swaps.append((start, end, place))
        else:
            self.trace.phases.append((start, end, place, "background" if span.background else span.kind))

    def after_step(self, now: float, ring_bytes: int) -> None:
        """Look at what requests hold ``now``, in seconds of the clock."""
        device, tiers = ring_bytes, {"device": 0, "host": 0, "disk": 0}
        for place, request in enumerate(self._requests):
            if request.metrics.rounds != self._rounds[place]:
                self._rounds[place] = request.metrics.rounds
                drafted, accepted = request.metrics.drafted_per_round[-1], request.metrics.accepted_per_round[-1]
                self.trace.windows.append((now, place, drafted, accepted))
            device += request.device_bytes()
            tiers[request.full.tier] += request.full.tier_bytes
        self.trace.memory.append((now, device, tiers["host"], tiers["disk"]))
