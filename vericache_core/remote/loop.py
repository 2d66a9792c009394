"""The drafting side's step loop: drafts of all remote requests share a step, verdicts come in between.

It is a :class:`StepLoop` whose remote requests have their full KV in a store on another machine. What runs locally
(plain requests, and remote ones after the store or the link failed) goes through the base, unchanged.
"""

from __future__ import annotations

import functools
import logging
import queue
import time
from collections.abc import Callable
from typing import Final

from vericache_core.engine import Engine
from vericache_core.errors import RemoteError, RemoteRefused, VeriCacheError
from vericache_core.remote.early import see_nothing
from vericache_core.remote.frames import Message
from vericache_core.remote.identity import facts_of, refuse_differences
from vericache_core.remote.lifecycle import Live
from vericache_core.remote.link import Link
from vericache_core.remote.provide import PrefixLoop
from vericache_core.remote.session import RemoteSession
from vericache_core.runtime.request import Request
from vericache_core.runtime.segments import Segment
from vericache_core.runtime.tile import StepFault, run_tile

log = logging.getLogger("vericache.remote")
_TICK: Final = 0.05


class RemoteLoop(PrefixLoop):
    """See the module's docstring; built by :meth:`connected`."""

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

    def step(self) -> list[Request]:
        self._take_events(block=False)
        self._note_peak()
        self._open_waiting()
        self._receiver.watch()
        self._begin_early()
        worked = self._draft()
        self._send()
        finished: list[Request] = []
        if self.requests:
            steps, self.scheduler.aside = self.steps, self._room.held
            finished = super().step()
            if self._remote or self._waiting:
                self._idle = 0  # what has no room here waits for them
            worked = worked or self.steps > steps or bool(finished)
        if not worked and (self._remote or self._waiting):
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

    def _start(self, request: Request) -> None:
        self._room.trim()
        super()._start(request)

    def _note_peak(self) -> None:
        held = self._prefixes.nbytes + sum(request.device_bytes() for request in self.live)
        self.peak_device_kv_bytes = max(self.peak_device_kv_bytes, held)

    def close(self) -> None:
        for live in list(self._remote.values()):
            self.remove(live.session.request)
        self._receiver.cancel()
        if self._early is not None:
            self._early.join()
        until = time.monotonic() + 1.0
        while any(not call.done() for call in self._goodbyes) and time.monotonic() < until:
            time.sleep(0.01)
        self.store.close()
        self._receiver.close()
        self._prefixes.clear()
        super().close()

    # -- drafting ------------------------------------------------------------------------------------

    def _draft(self) -> bool:
        """One step of drafts of as many requests as fit; those that drafted least come first."""
        segments: list[Segment[Request]] = []
        sessions: list[RemoteSession] = []
        first = 0
        ready = sorted((live.session for live in self._remote.values()), key=lambda session: len(session.ahead))
        for session in ready:
            want = session.want(self.adapter.most_rows - first)
            if want is not None and want.tokens:
                segments.append(Segment(session.request, want, first, len(want.tokens)))
                sessions.append(session)
                first += len(want.tokens)
        if not segments:
            return False
        started = time.perf_counter()
        try:
            logits = run_tile(self.adapter, segments, self._attend, see_nothing)
        except StepFault as fault:
            self._fail(self._remote[fault.request.number], fault.error)
            return True
        seconds = time.perf_counter() - started
        self.steps += 1
        for session, segment in zip(sessions, segments, strict=True):
            self._take_rows(session, segment, logits, seconds)
        self._note_peak()
        return True

    def _send(self) -> None:
        for live in self._remote.values():
            drafts = live.session.block()
            if drafts is not None:
                self._ask_verdict(live, live.session.sent(drafts), again=True)

    def _ask_verdict(self, live: Live, question: Message, *, again: bool) -> None:
        def done(answer: Message | RemoteError) -> None:
            self._events.put(lambda: self._answered(live, question, answer, again))

        live.call = self.store.ask_later("verify", question, done)

    def _answered(self, live: Live, question: Message, answer: Message | RemoteError, again: bool) -> None:
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

    def _verdict(self, live: Live, message: Message) -> bool:
        """Take a verdict in; False, and nothing changed, if it is not the one that is due."""
        session = live.session
        try:
            if not session.awaits(message.expect("verdict")):
                self.stats.dropped_verdicts += 1
                return False
            self.stats.verdict_seconds.append(time.monotonic() - session.sent_at)
            before = session.request.metrics.drafted, session.request.metrics.accepted
            session.take_verdict(message, generates=live.mode == "remote")
            self._chooser.learn(session.request.metrics.drafted - before[0], session.request.metrics.accepted - before[1])
        except VeriCacheError as error:
            self._fail(live, error)
        return True

    def _take_events(self, *, block: bool) -> None:
        try:
            while True:
                self._events.get(block=block, timeout=_TICK if block else None)()
                block = False
        except queue.Empty:
            return
