"""The drafting side's step loop: drafts of all remote requests share a step, verdicts come in between.

It is a :class:`StepLoop` whose remote requests have their full KV in a store on another machine. What runs locally
(plain requests, and remote ones after the store or the link failed) goes through the base, unchanged.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import queue
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

from vericache_core.cache.draft import DraftKV
from vericache_core.config import EngineConfig
from vericache_core.engine import Engine
from vericache_core.errors import ConfigError, RemoteError, RemoteRefused, VeriCacheError
from vericache_core.kv import CompressedKV
from vericache_core.remote.frames import Message, ids_to_bytes
from vericache_core.remote.identity import Facts, facts_of, refuse_differences
from vericache_core.remote.layers import Assembly, full_pages, take_layer
from vericache_core.remote.link import Link, Stream
from vericache_core.remote.measure import LinkSpeed, measure_link
from vericache_core.remote.paths import Task, best_window, choose_path
from vericache_core.remote.prefixes import Backoff, Local, Prefixes
from vericache_core.remote.session import RemoteSession
from vericache_core.runtime.admission import QueueFull
from vericache_core.runtime.loop import StepLoop
from vericache_core.runtime.request import Request, Want
from vericache_core.runtime.segments import Segment
from vericache_core.runtime.tile import StepFault, run_tile

log = logging.getLogger("vericache.remote")
OPENERS: Final = 32
"""Sessions that may be on their way to be opened at a time."""
_TICK: Final = 0.05


@dataclass
class LinkStats:
    """What the link did since the engine started.

    Attributes:
        transfers: by kind, ``prefix`` and ``rows``: bytes and seconds of the newest one.
        verdict_seconds: from a question to its verdict, each time.
        first_draft_seconds: from the opening of a session to its first draft.
    """

    transfers: dict[str, tuple[int, float]] = field(default_factory=dict)
    sessions: int = 0
    failures: int = 0
    dropped_verdicts: int = 0
    received_bytes: int = 0
    verdict_seconds: list[float] = field(default_factory=list)
    first_draft_seconds: list[float] = field(default_factory=list)


@dataclass(eq=False)
class _Live:
    """A remote request on its way."""

    session: RemoteSession
    prefix: Local
    mode: str
    call: Any = None


class RemoteLoop(StepLoop):
    """See the module's docstring.

    Args:
        base: arguments of :class:`StepLoop`.
        engine: makes compressors.
        link: to the store.
        facts: of this side.
    """

    def __init__(self, *base: Any, engine: Engine, link: Link, facts: Facts) -> None:
        super().__init__(*base)
        self.store, self.stats = link, LinkStats()
        self._engine, self._config, self._facts = engine, engine.config, facts
        self._waiting: list[Request] = []
        self._remote: dict[int, _Live] = {}
        self._prefixes, self._backoff = Prefixes(), Backoff()
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: set[Stream] = set()
        self._goodbyes: list[Any] = []
        self._measured: LinkSpeed | None = None
        self._wrong = self._judged = 0
        self._workers = ThreadPoolExecutor(OPENERS, "vericache-link")

    @classmethod
    def connected(cls, engine: Engine) -> Callable[..., RemoteLoop]:
        """A maker of loops for ``engine``: says hello to the store first.

        Raises:
            RemoteRefused: the sides do not fit, or the store does not know this one.
            RemoteError: there is no answer, and the configuration says to fail then.
        """
        link, facts = Link.from_config(engine.config), facts_of(engine)
        try:
            if engine.config.remote_mode != "local":
                welcome = link.ask("hello", Message("hello", {"facts": facts})).expect("welcome")
                refuse_differences(facts, welcome.table("facts"))
        except RemoteError as error:
            if isinstance(error, RemoteRefused) or engine.config.on_remote_error == "fail":
                link.close()
                raise
            log.warning("%s; going on without the store until it answers", error)
        return functools.partial(cls, engine=engine, link=link, facts=facts)

    # -- the surface of a step loop ------------------------------------------------------------------

    @property
    def live(self) -> list[Request]:
        return [*self.requests, *self._waiting, *(live.session.request for live in self._remote.values())]

    @property
    def queued(self) -> int:
        return super().queued + len(self._waiting)

    def add(self, request: Request) -> None:
        if self._config.remote_mode == "local" or request.finished:
            request.metrics.mode = "plain"
        if request.metrics.mode != "remote":
            super().add(request)
            return
        if request.params.logits_processors or request.logits is not None:
            name = "logits_processors" if request.params.logits_processors else "record_logits"
            raise ConfigError(f"{name} cannot cross the link to the store", hint="use a local full_kv, or compressor=None")
        if len(self._waiting) >= self._config.max_queue:
            raise QueueFull(f"{len(self._waiting)} requests wait already", hint="raise max_queue, or try again later")
        self._waiting.append(request)

    def remove(self, request: Request) -> None:
        self._waiting = [other for other in self._waiting if other is not request]
        live = self._remote.pop(request.number, None)
        if live is not None:
            self._hang_up(live)
        super().remove(request)

    def step(self) -> list[Request]:
        self._take_events(block=False)
        self._open_waiting()
        self._watch()
        worked = self._draft()
        self._send()
        finished: list[Request] = []
        if self.requests:
            finished = super().step()
            worked = True
        if not worked and self._remote:
            started = time.perf_counter()
            self._take_events(block=True)
            self.exposed_seconds += time.perf_counter() - started
        if self._remote:
            self.observer.stepped(self)
        for live in list(self._remote.values()):
            request = live.session.request
            if request.finished:
                request.metrics.new_tokens = len(request.generated)
                self.remove(request)
                finished.append(request)
        return finished

    def close(self) -> None:
        for live in list(self._remote.values()):
            self.remove(live.session.request)
        for stream in list(self._streams):
            stream.cancel()
        until = time.monotonic() + 1.0
        while any(not call.done() for call in self._goodbyes) and time.monotonic() < until:
            time.sleep(0.01)
        self.store.close()
        self._workers.shutdown(wait=True, cancel_futures=True)
        self._prefixes.clear()
        super().close()

    # -- drafting ------------------------------------------------------------------------------------

    def _draft(self) -> bool:
        """One step of drafts of as many requests as fit; those that drafted least come first."""
        segments: list[Segment[Request]] = []
        wants: list[tuple[RemoteSession, Want]] = []
        first = 0
        ready = sorted((live.session for live in self._remote.values()), key=lambda session: len(session.ahead))
        for session in ready:
            want = session.want(self.adapter.most_rows - first)
            if want is not None and want.tokens:
                segments.append(Segment(session.request, want, first, len(want.tokens)))
                wants.append((session, want))
                first += len(want.tokens)
        if not segments:
            return False
        started = time.perf_counter()
        try:
            logits = run_tile(self.adapter, segments, self._attend, _see_nothing)
        except StepFault as fault:
            self._fail(self._remote[fault.request.number], fault.error)
            return True
        seconds = time.perf_counter() - started
        self.steps += 1
        for (session, want), segment in zip(wants, segments, strict=True):
            fresh = session.first_draft_at is None
            session.take(want, logits[segment.first : segment.first + segment.count])
            if fresh and session.first_draft_at is not None:
                self.stats.first_draft_seconds.append(session.first_draft_at - session.added_at)
            metrics = session.request.metrics
            metrics.steps += 1
            metrics.add_seconds("draft", seconds)
            metrics.peak_device_kv_bytes = max(metrics.peak_device_kv_bytes, session.request.device_bytes())
        self.peak_device_kv_bytes = max(self.peak_device_kv_bytes, sum(request.device_bytes() for request in self.live))
        return True

    def _send(self) -> None:
        for live in self._remote.values():
            drafts = live.session.block()
            if drafts is not None:
                self._ask_verdict(live, live.session.sent(drafts), again=True)

    def _ask_verdict(self, live: _Live, question: Message, *, again: bool) -> None:
        def done(answer: Message | RemoteError) -> None:
            self._events.put(lambda: self._answered(live, question, answer, again))

        live.call = self.store.ask_later("verify", question, done)

    def _answered(self, live: _Live, question: Message, answer: Message | RemoteError, again: bool) -> None:
        if self._remote.get(live.session.request.number) is not live:
            return
        if not isinstance(answer, RemoteError):
            if self._verdict(live, answer):
                return
            answer = RemoteError("the store answered another question than the one it was asked")
        soon = time.monotonic() - live.session.sent_at < self.store.timeout / 2
        if again and soon and not isinstance(answer, RemoteRefused):
            self._ask_verdict(live, question, again=False)  # the store answers the same question the same way
        else:
            self._fail(live, answer)

    def _verdict(self, live: _Live, message: Message) -> bool:
        """Take a verdict in; False, and nothing changed, if it is not the one that is due."""
        session = live.session
        try:
            if not session.awaits(message.expect("verdict")):
                self.stats.dropped_verdicts += 1
                return False
            self.stats.verdict_seconds.append(time.monotonic() - session.sent_at)
            before = session.request.metrics.drafted, session.request.metrics.accepted
            session.take_verdict(message, generates=live.mode == "remote")
            # A rejection judges one draft wrong; those behind it were never looked at.
            drafted, accepted = session.request.metrics.drafted - before[0], session.request.metrics.accepted - before[1]
            self._wrong += drafted > accepted
            self._judged += accepted + (drafted > accepted)
        except VeriCacheError as error:
            self._fail(live, error)
        return True

    # -- opening and receiving -----------------------------------------------------------------------

    def _open_waiting(self) -> None:
        while self._waiting and len(self._remote) < self._config.max_running:
            if not self._backoff.open:
                self._go_local(self._waiting.pop(0), "the link to the store failed a moment ago")
                continue
            prompts = [request.tokens for request in self._waiting]
            request = self._waiting.pop(0)
            others = [*prompts[1:], *(live.session.request.tokens for live in self._remote.values())]
            prefix = self._prefixes.of(request.tokens[: request.prompt_tokens], others)
            try:
                mode, window = self._choose(request, prefix, 1 + len(others))
            except RemoteError as error:
                self._prefixes.leave(prefix)
                self._backoff.failed()
                self._go_local(request, str(error))
                continue
            if mode == "local":
                self._prefixes.leave(prefix)
                self._join(request)
                continue
            live = _Live(RemoteSession(request, window, self.adapter.vocab_size), prefix, mode)
            self._remote[request.number] = live
            self.stats.sessions += 1
            self._workers.submit(self._open, live)

    def _task(self, request: Request, prefix: Local, company: int) -> Task:
        """What is known of a request and those that came with it, for the choice of a path and a window."""
        name, tokens = request.metrics.compressor or "", len(prefix.ids)
        full = float(self._token_bytes() * tokens)
        if prefix.draft is not None:
            kept = prefix.draft.device_bytes / full
        else:
            keep = _options(self._config, name).get("keep", 0.3)
            kept = float(keep) if isinstance(keep, int | float) else 0.3
        speed = self._speed
        return Task(
            requests=company,
            prefix=tokens,
            new_tokens=max(1, request.params.max_new_tokens),
            full_bytes=full,
            kept=min(1.0, kept),
            hazard=min(0.95, max(0.005, self._hazard)),
            latency=speed.latency,
            bandwidth=speed.bandwidth,
            reload=1.0 / max(self._engine.planner.pricer.costs.links["host"].seconds_per_byte, 1e-15),
            here=prefix.draft is not None,
        )

    @property
    def _speed(self) -> LinkSpeed:
        """Of the link, measured once, when it is first asked for."""
        if self._measured is None:
            self._measured = measure_link(self.store)
        return self._measured

    @property
    def _hazard(self) -> float:
        """Chance of a draft to be wrong, by what verdicts said so far."""
        return (self._wrong + 1.0) / (self._judged + 20.0)

    def _choose(self, request: Request, prefix: Local, company: int) -> tuple[str, int]:
        """Mode and window of a request: as configured, or the fastest by measured costs.

        Raises:
            RemoteError: the link could not be measured.
        """
        mode, window = self._config.remote_mode, self._config.window
        if mode != "auto" and isinstance(window, int):
            return mode, window
        task, costs = self._task(request, prefix, company), self._engine.planner.pricer.costs
        if mode == "auto":
            mode = choose_path(costs, task)
        if window == "auto":
            window = best_window(costs, task, stateless=mode.endswith("stateless"))
        return mode, window

    def _open(self, live: _Live) -> None:
        """On a worker: open a session and listen to what the store says of itself."""
        request, config = live.session.request, self._config
        drafts = not live.mode.startswith(("remote", "fetch"))
        params = {f.name: getattr(request.params, f.name) for f in dataclasses.fields(request.params)}
        del params["logits_processors"]
        fields = {
            "facts": self._facts,
            "prefix": len(live.prefix.ids),
            "compressor": request.metrics.compressor if drafts else None,
            "options": _options(config, request.metrics.compressor) if drafts else {},
            "params": params,
            "generate": int(live.mode == "remote"),
            "stateless": int(live.mode.endswith("stateless")),
        }
        message = Message("open", fields, ids_to_bytes(request.tokens[: request.prompt_tokens]))
        self._listen(live, "open", message, lambda found: self._events.put(lambda: self._opened(live, found)))

    def _listen(self, live: _Live, method: str, message: Message, take: Callable[[Message], None]) -> None:
        """Pass the messages of a stream on; what goes wrong becomes a failure of ``live``."""
        stream = None
        try:
            stream = self.store.stream(method, message)
            self._streams.add(stream)
            for found in stream:
                take(found)
        except VeriCacheError as failure:
            error = failure
            self._events.put(lambda: self._stream_failed(live, method, error))
        except Exception as failure:
            log.exception("receiving %s failed", method)
            broken = RemoteError(f"receiving {method} failed", cause=type(failure).__name__)
            self._events.put(lambda: self._stream_failed(live, method, broken))
        finally:
            if stream is not None:
                self._streams.discard(stream)

    def _opened(self, live: _Live, message: Message) -> None:
        if self._remote.get(live.session.request.number) is not live:
            if message.kind == "opened":
                self._say_goodbye(str(message.fields.get("session")))
            return
        if message.kind == "beat":
            return
        if message.kind != "opened":
            self._verdict(live, message)
            return
        try:
            live.session.number = message.text("session", 64)
            message.number("tokens", len(live.prefix.ids), len(live.prefix.ids))
        except RemoteError as error:
            self._fail(live, error)
            return
        self._backoff.worked()
        if live.mode != "remote":
            self._provide(live)

    def _provide(self, live: _Live) -> None:
        """Give a request what of its prefix is here, and fetch what is not."""
        prefix, request = live.prefix, live.session.request
        if not live.mode.startswith("fetch"):
            if prefix.draft is None:
                self._fetch(live, "prefix")
                return
            if request.draft is None:
                request.draft = prefix.draft.twin()
                request.metrics.compressed_kv_bytes = prefix.draft.device_bytes
                request.metrics.compressed_from_bytes = self._token_bytes() * len(prefix.ids)
        if live.mode.startswith(("fetch", "stream")):
            if prefix.rows is None:
                self._fetch(live, "rows")
            else:
                self._come_home(live)

    def _fetch(self, live: _Live, what: str) -> None:
        prefix = live.prefix
        if what in prefix.fetching:
            return  # another request does; it provides for all
        prefix.fetching.add(what)
        receive = self._receive_prefix if what == "prefix" else self._receive_rows
        self._workers.submit(receive, live)

    def _receive_prefix(self, live: _Live) -> None:
        """On a worker: build the draft KV of a prefix layer by layer, as it comes in."""
        layers, prefix = self.adapter.layers, live.prefix
        name = str(live.session.request.metrics.compressor)
        assembly = Assembly(layers, len(prefix.ids), range(len(layers)))
        draft = DraftKV(layers, self.adapter.device, CompressedKV(name, {}, len(prefix.ids), layers, ()))
        started = time.monotonic()

        def take(message: Message) -> None:
            if message.kind == "end":
                assembly.finish()
                taken = assembly.received, time.monotonic() - started
                self._events.put(lambda: self._received(prefix, "prefix", taken, draft=draft))
                return
            complete = assembly.take(message.expect("part"))
            if complete is not None:
                take_layer(draft, layers[complete[0]], complete[1], name, self._engine.make_compressor)

        self._listen(live, "prefix", Message("prefix", {"session": live.session.number}), take)

    def _receive_rows(self, live: _Live) -> None:
        """On a worker: put the full KV of a prefix together from what comes in and what is here."""
        layers, prefix = self.adapter.layers, live.prefix
        assembly = Assembly(layers, len(prefix.ids), range(len(layers)))
        rows: dict[int, Any] = {}
        started = time.monotonic()

        def take(message: Message) -> None:
            if message.kind == "end":
                assembly.finish()
                taken = assembly.received, time.monotonic() - started
                self._events.put(lambda: self._received(prefix, "rows", taken, rows=rows))
                return
            complete = assembly.take(message.expect("part"))
            if complete is not None:
                index, blob = complete
                rows[index] = full_pages(layers[index], blob, len(prefix.ids), prefix.draft, self.adapter.device)

        question = Message("rows", {"session": live.session.number, "compressed": int(prefix.draft is not None)})
        self._listen(live, "rows", question, take)

    def _received(self, prefix: Local, what: str, taken: tuple[int, float], **found: Any) -> None:
        prefix.fetching.discard(what)
        for name, value in found.items():
            setattr(prefix, name, value)
        self.stats.received_bytes += taken[0]
        self.stats.transfers[what] = taken
        for live in list(self._remote.values()):
            if live.prefix is prefix and live.session.number is not None:
                self._provide(live)

    def _token_bytes(self) -> int:
        return sum(layer.token_bytes for layer in self.adapter.layers)

    # -- ends and failures ---------------------------------------------------------------------------

    def _come_home(self, live: _Live) -> None:
        """The full KV of the prefix is here: from now on the request decodes plainly, by itself."""
        request, prefix = live.session.request, live.prefix
        assert prefix.rows is not None
        del self._remote[request.number]
        self._hang_up(live)
        request.forget_draft()
        request.full.begin_with(prefix.rows.__getitem__, len(prefix.ids))
        self._join(request)

    def _go_local(self, request: Request, reason: str) -> None:
        """Recompute by policy: the committed tokens stay, and a prefill of ours goes on from them."""
        if self._config.on_remote_error == "fail":
            request.fail(RemoteError(reason, hint="on_remote_error=recompute goes on without the store"))
            return
        text = "request %d: %s; recomputing its full KV here"
        log.warning(text, request.number, reason, extra={"request": request.number})
        request.metrics.degraded.append(f"full KV recomputed here: {reason}")
        request.forget_draft()
        self._join(request)

    def _join(self, request: Request) -> None:
        request.metrics.mode = "plain"
        try:
            super().add(request)
        except VeriCacheError as error:
            request.fail(error)

    def _stream_failed(self, live: _Live, method: str, error: VeriCacheError) -> None:
        there = self._remote.get(live.session.request.number) is live
        if there:
            self._fail(live, error)
        if method == "open":
            return
        live.prefix.fetching.discard(method)
        for other in list(self._remote.values()):  # whoever waited for what this one was fetching
            if other.prefix is not live.prefix or other.session.number is None:
                continue
            if there and (method == "rows" or other.session.request.draft is None):
                self._fail(other, error)
            elif not there:  # it was cancelled: another one fetches
                self._provide(other)

    def _fail(self, live: _Live, error: VeriCacheError) -> None:
        request = live.session.request
        self.stats.failures += 1
        if not isinstance(error, RemoteRefused):
            self._backoff.failed()
        del self._remote[request.number]
        self._hang_up(live)
        if self._config.on_remote_error == "fail":
            request.fail(error)
            request.metrics.new_tokens = len(request.generated)
            return
        self._go_local(request, str(error))

    def _hang_up(self, live: _Live) -> None:
        live.session.closing = True
        self._prefixes.leave(live.prefix)
        if live.call is not None:
            live.call.cancel()
        if live.session.number is not None:
            self._say_goodbye(live.session.number)

    def _say_goodbye(self, number: str) -> None:
        """Tell the store that a session is over; it would find out by itself, only later."""
        self._goodbyes = [call for call in self._goodbyes if not call.done()]
        self._goodbyes.append(self.store.ask_later("close", Message("close", {"session": number}), lambda _: None))

    def _watch(self) -> None:
        now = time.monotonic()
        for stream in list(self._streams):
            stream.check(now)

    def _take_events(self, *, block: bool) -> None:
        try:
            while True:
                self._events.get(block=block, timeout=_TICK if block else None)()
                block = False
        except queue.Empty:
            return


def _options(config: EngineConfig, name: str | None) -> dict[str, Any]:
    """Options that the configuration gives the compressor ``name``."""
    return config.compressor_options() if name == config.compressor else {}


def _see_nothing(_segment: Segment[Request], _layer: int, _queries: Tensor, _keys: Tensor) -> None:
    """Draft rows are observed by nobody."""
