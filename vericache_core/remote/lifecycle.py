"""How remote requests come and go: sessions are opened and ended, and what fails goes on here.

A request that the store or the link let down goes through the base like any other, from the tokens it has.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vericache_core.engine import Engine
from vericache_core.errors import ConfigError, RemoteError, RemoteRefused, VeriCacheError
from vericache_core.remote.choose import PathChooser
from vericache_core.remote.frames import Message, ids_to_bytes
from vericache_core.remote.identity import Facts
from vericache_core.remote.link import Link
from vericache_core.remote.link_stats import LinkStats
from vericache_core.remote.prefixes import Backoff, Local
from vericache_core.remote.receive import Delivery, Receiver
from vericache_core.remote.room import DeviceRoom, drafts
from vericache_core.remote.session import RemoteSession
from vericache_core.runtime.admission import QueueFull
from vericache_core.runtime.loop import StepLoop
from vericache_core.runtime.request import Request

log = logging.getLogger("vericache.remote")


@dataclass(eq=False)
class Live:
    """A remote request on its way."""

    session: RemoteSession
    prefix: Local
    mode: str
    call: Any = None


class SessionLoop(StepLoop):
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
        self._remote: dict[int, Live] = {}
        self._room = DeviceRoom(self.scheduler, engine.planner, self._token_bytes(), self._config.remote_prefix_bytes)
        self._prefixes, self._backoff = self._room.prefixes, Backoff()
        self._first: Live | None = None  # of the first that waits, once it has claimed its bytes
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._goodbyes: list[Any] = []
        self._chooser = PathChooser(engine, link)
        self._receiver = Receiver(link, self.adapter, engine.compressors.make)

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
        if self._first is not None and self._first.session.request is request:
            self._unclaim()
        live = self._remote.pop(request.number, None)
        if live is not None:
            self._hang_up(live)
        super().remove(request)

    @abstractmethod
    def _verdict(self, live: Live, message: Message) -> bool:
        """Take a verdict in; False, and nothing changed, if it is not the one that is due."""

    @abstractmethod
    def _delivery_of(self, live: Live) -> Delivery | None:
        """What takes in the KV that a request needs next and that is neither here nor on its way, from now on."""

    @abstractmethod
    def _provide(self, live: Live) -> None:
        """Give a request whose session is open what of its prefix is here, and fetch what is not."""

    # -- opening -----------------------------------------------------------------------

    def _open_waiting(self) -> None:
        while self._waiting and len(self._remote) < self._config.max_running:
            if not self._backoff.open:
                self._unclaim()
                self._go_local(self._waiting.pop(0), "the link to the store failed a moment ago")
                continue
            if self._first is None:
                came_first = any(ticket.number < self._waiting[0].number for ticket in self.scheduler.waiting)
                if came_first and self._config.device_budget is not None:
                    return
                self._first = self._claim()
            live = self._first
            if live is None:
                continue
            if not self._room.fits:
                return  # nobody who came later gets what it waits for
            self._first = None
            self._room.trim()
            self._remote[self._waiting.pop(0).number] = live
            self.stats.sessions += 1
            self._open(live)

    def _claim(self) -> Live | None:
        """Decide how the first that waits goes on, and claim its bytes; ``None`` where it goes on otherwise, or not at all."""
        prompts = [request.tokens for request in self._waiting]
        request = self._waiting[0]
        others = [*prompts[1:], *(live.session.request.tokens for live in self._remote.values())]
        prefix = self._prefixes.of(request.tokens[: request.prompt_tokens], others)
        try:
            mode, window = self._chooser.choose(request, prefix, 1 + len(others))
            if mode != "local":
                self._room.claim(request, prefix, mode)
                return Live(RemoteSession(request, window, self.adapter.vocab_size), prefix, mode)
        except RemoteError as error:
            self._backoff.failed()
            self._waiting.pop(0)
            self._go_local(request, str(error))
        except ConfigError as error:
            self._waiting.pop(0)
            request.fail(error)
        else:
            self._waiting.pop(0)
            self._join(request)
        self._room.release(request, prefix)
        return None

    def _unclaim(self) -> None:
        if self._first is not None:
            self._room.release(self._first.session.request, self._first.prefix)
            self._first = None

    def _open(self, live: Live) -> None:
        """Open a session and listen to what the store says of itself."""
        request = live.session.request
        live.session.added_at = time.monotonic()
        compressor = request.metrics.compressor if drafts(live.mode) else None
        params = {f.name: getattr(request.params, f.name) for f in dataclasses.fields(request.params)}
        del params["logits_processors"]
        fields = {
            "facts": self._facts,
            "prefix": len(live.prefix.ids),
            "compressor": compressor,
            "options": {} if compressor is None else self._config.options_of(compressor),
            "params": params,
            "generate": int(live.mode == "remote"),
            "stateless": int(live.mode.endswith("stateless")),
            "send": None,
            "compressed": 0,
        }
        delivery = self._delivery_of(live)
        if delivery is not None:  # it follows at once: to ask when the session is open would cost one more round trip
            fields |= {"send": delivery.what, "compressed": int(delivery.holds_compressed)}
        self._receiver.listen(
            "open",
            Message("open", fields, ids_to_bytes(request.tokens[: request.prompt_tokens])),
            lambda found: self._events.put(lambda: self._opened(live, found)),
            self._failing(live, delivery),
            delivery,
        )

    def _opened(self, live: Live, message: Message) -> None:
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

    def _failing(self, live: Live, delivery: Delivery | None) -> Callable[[VeriCacheError], None]:
        """What to call on any thread when a stream of ``live`` ends early; see :meth:`_stream_failed`."""
        return lambda error: self._events.put(lambda: self._stream_failed(live, delivery, error))

    def _token_bytes(self) -> int:
        return sum(layer.token_bytes for layer in self.adapter.layers)

    # -- ends and failures ---------------------------------------------------------------------------

    def _come_home(self, live: Live) -> None:
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

    def _stream_failed(self, live: Live, delivery: Delivery | None, error: VeriCacheError) -> None:
        """A stream of ``live`` has ended early; KV of the prefix was to come on it, for others as well."""
        there = self._remote.get(live.session.request.number) is live
        opened = live.session.number is not None
        if there:
            self._fail(live, error)
        if delivery is None or live.prefix.fetching.get(delivery.what) is not delivery:
            return  # none was, or it had come before
        del live.prefix.fetching[delivery.what]
        self._room.trim()
        for other in list(self._remote.values()):  # whoever waited for what this one was fetching
            if other.prefix is not live.prefix or other.session.number is None:
                continue
            if not there or not opened:  # it was cancelled or refused: another one fetches
                self._provide(other)
            elif delivery.what == "rows" or other.session.request.draft is None:
                self._fail(other, error)

    def _fail(self, live: Live, error: VeriCacheError) -> None:
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

    def _hang_up(self, live: Live) -> None:
        live.session.closing = True
        self._room.release(live.session.request, live.prefix)
        if live.call is not None:
            live.call.cancel()
        if live.session.number is not None:
            self._say_goodbye(live.session.number)

    def _say_goodbye(self, number: str) -> None:
        """Tell the store that a session is over; it would find out by itself, only later."""
        self._goodbyes = [call for call in self._goodbyes if not call.done()]
        self._goodbyes.append(self.store.ask_later("close", Message("close", {"session": number}), lambda _: None))
