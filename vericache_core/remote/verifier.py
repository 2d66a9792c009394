"""The store's engine: one thread that prefills prefixes, verifies the drafts of all sessions, and owns every token.

Sessions are ordinary requests of the engine's step loop. A session is in the loop while there is something to compute
and out of it while its drafts are on their way, so verifies that arrive together share a step.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

from vericache_core.engine import Engine
from vericache_core.errors import RemoteError, RemoteRefused, VeriCacheError
from vericache_core.remote.audit import TwinAudit
from vericache_core.remote.commands import Commands
from vericache_core.remote.frames import Message, RunningDigest
from vericache_core.remote.limits import Limits
from vericache_core.remote.prepare import Ask, Preparations
from vericache_core.remote.shelf import Prefix, Shelf
from vericache_core.runtime.output import TokenLogprobs
from vericache_core.runtime.request import Request

log = logging.getLogger("vericache.remote")
GATHER: Final = 0.002
"""Seconds to wait for company before a step; ten times that at most."""
_TICK: Final = 0.2
"""Seconds between two looks for silent sessions while nothing happens."""
_ABORT: Final = 0.05
"""Seconds between two orders to stop loads while the thread ends."""


@dataclass(eq=False)
class Session:
    """One request of one client.

    Attributes:
        told: generated tokens that the client was told of; ``seq`` counts the verdicts that told it.
        first: the first verdict.
        last: the newest question and its answer, for a client that asks again because the answer was lost.
        waiting, due: who waits for the next verdict, and what was asked.
        stream: verdicts of a session that generates by itself.
    """

    number: str
    tenant: str
    prefix: Prefix
    request: Request
    digest: RunningDigest
    generate: bool
    seen: float
    reserved: int
    first: Future[Message] = field(default_factory=Future)
    told: int = 0
    seq: int = 0
    last: tuple[tuple[int, int, tuple[int, ...]], Message] | None = None
    waiting: Future[Message] | None = None
    due: tuple[int, int, tuple[int, ...]] = (0, 0, ())
    stream: queue.SimpleQueue[Message | VeriCacheError] = field(default_factory=queue.SimpleQueue)


class Verifier:
    """See the module's docstring. Methods may be called from any thread; they return futures.

    Args:
        engine: nobody else may use it from now on.
        limits: what is taken on.
    """

    def __init__(self, engine: Engine, limits: Limits) -> None:
        self.engine, self.limits = engine, limits
        self.shelf = Shelf(limits.prefix_bytes)
        self.sessions: dict[str, Session] = {}
        self._commands = Commands()
        self._preparations = Preparations(engine, self.shelf, limits.sessions)
        self._audit = TwinAudit(engine)
        self._by_request: dict[int, Session] = {}
        self._in_order = False
        self._thread = threading.Thread(target=self._run, name="vericache-verifier", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """Whether the thread has ended without being told to, so that every question has an error for an answer."""
        return not self._thread.is_alive() and not self._in_order

    # -- called from other threads -------------------------------------------------------------------

    def prepare(self, ask: Ask) -> Future[Prefix]:
        """Have the prefix ready: from the shelf, or by a prefill; its user count is one higher when it comes."""
        result: Future[Prefix] = Future()
        self._commands.submit(result, lambda: self._preparations.begin(ask, result))
        return result

    def progress(self) -> tuple[int, int]:
        """Prompt rows that are computed, and those that are to be, of everything under way."""
        return self._preparations.progress()

    def open(self, ask: Ask, prefix: Prefix) -> Future[Session]:
        """Make a session on a prefix that :meth:`prepare` gave; its first verdict comes by :meth:`first`."""
        return self._commands.call(lambda: self._open(ask, prefix))

    def release(self, prefix: Prefix) -> Future[None]:
        """Undo the count of a :meth:`prepare` whose prefix no session was opened on."""
        return self._commands.call(lambda: self._release(prefix))

    def find(self, tenant: str, number: str) -> Session:
        """The session of this tenant; raises ``RemoteRefused`` for any other."""
        session = self.sessions.get(number)
        if session is None or session.tenant != tenant:
            raise RemoteRefused("no such session", hint="it has ended, or was silent for too long")
        session.seen = time.monotonic()
        return session

    def touch(self, session: Session) -> None:
        """Whoever leans on the prefix of ``session`` is alive while it is on its way; raises if that one has ended."""
        self.find(session.tenant, session.number)
        now = time.monotonic()
        for other in list(self.sessions.values()):
            if other.prefix is session.prefix:
                other.seen = now

    def verify(self, session: Session, seq: int, base: int, drafts: Sequence[int]) -> Future[Message]:
        """Verify ``drafts`` behind ``base`` committed tokens; a repeated question gets the same answer again."""
        result: Future[Message] = Future()
        self._commands.submit(result, lambda: self._verify(session, (seq, base, tuple(drafts)), result))
        return result

    def close_session(self, session: Session) -> Future[None]:
        """End a session and give its memory back."""
        return self._commands.call(lambda: self._drop(session))

    def close(self) -> None:
        """Stop the thread, and loads that a step of it waits for; whoever waits gets an error. Safe to call twice."""
        self._commands.close()
        while self._thread.is_alive():
            for request in self.engine.loop.live:  # again and again: what was asked last may only begin now
                request.full.abort()
            self._thread.join(_ABORT)

    # -- on the engine's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        """Work until the end, which comes in order or by a fault of our own: in either case nobody is left waiting."""
        try:
            with ExitStack() as end:  # each of these happens, whatever the others raise; the last one first
                end.callback(self.shelf.clear)
                end.callback(self._commands.end)
                end.callback(self._drop_all, RemoteError("the store is closing"))
                end.callback(self._commands.closing.set)
                self._work()
            self._in_order = True
        except Exception:
            log.exception("the verifier of the store failed, and has ended")

    def _work(self) -> None:
        loop = self.engine.loop
        while not self._commands.closing.is_set():
            if self._commands.run_next(0.0 if loop.requests else _TICK):
                self._gather()
            if loop.requests:
                try:
                    loop.step()
                    if self._commands.closing.is_set():
                        break  # its loads may have been stopped, and what became of it then is no answer
                    self._settle()
                except Exception as error:
                    log.exception("a step of the store failed")
                    self._drop_all(RemoteError("a step of the store failed", cause=type(error).__name__))
            self._reap()

    def _gather(self) -> None:
        """Take in what else arrives now: drafts that come together are to share a step, and one alone would cost as much."""
        until = time.monotonic() + 10 * GATHER
        while time.monotonic() < until and self._commands.run_next(GATHER if self.engine.loop.requests else 0.0):
            pass

    def _drop_all(self, error: VeriCacheError) -> None:
        """End everything under way; nobody may be left waiting."""
        with ExitStack() as end:  # what cannot be given back must not keep others from their answers
            end.callback(self._audit.end)
            end.callback(self._preparations.end, error)
            for session in list(self.sessions.values()):
                end.callback(self._drop, session, error)

    def _open(self, ask: Ask, prefix: Prefix) -> Session:
        try:
            reserved = self._check_room(ask, prefix)
            tier = "device"
            if ask.stateless:
                tier = self.engine.config.full_kv if self.engine.config.full_kv in {"host", "disk"} else "host"
            full = self.engine.builder.make_full_kv(None, tier)
            full.begin_with(prefix.full.device_pages, prefix.tokens)
            request = self.engine.builder.make_request(ask.ids, ask.params, full)
            request.tenant, request.metrics.compressor = ask.tenant, ask.compressor
            if not request.finished:
                self.engine.loop.add(request)
        except VeriCacheError:
            self._release(prefix)
            raise
        number, now = secrets.token_hex(16), time.monotonic()
        session = Session(number, ask.tenant, prefix, request, RunningDigest(ask.ids), ask.generate, now, reserved)
        session.waiting = session.first
        self.sessions[number] = self._by_request[request.number] = session
        if request.finished:  # nothing was asked for
            self._answer(session)
        return session

    def _check_room(self, ask: Ask, prefix: Prefix) -> int:
        """Bytes of KV that the session takes beyond its prefix; raises ``RemoteRefused`` where there is no room."""
        limits = self.limits
        mine = sum(1 for session in self.sessions.values() if session.tenant == ask.tenant)
        if len(self.sessions) >= limits.sessions or mine >= limits.tenant_sessions:
            raise RemoteRefused("the store holds as many sessions as it may", hint="close some, or try again later")
        per_token = sum(layer.token_bytes for layer in self.engine.adapter.layers)
        fresh = (len(ask.ids) + ask.params.max_new_tokens - (0 if ask.stateless else prefix.tokens)) * per_token
        held = sum(session.reserved for session in self.sessions.values() if not session.request.finished)
        if held + fresh > limits.session_bytes:
            raise RemoteRefused("the store has no room for another session", hint="try again later, or ask for less")
        return fresh

    def _verify(self, session: Session, asked: tuple[int, int, tuple[int, ...]], result: Future[Message]) -> None:
        seq, base, drafts = asked
        if session.last is not None and session.last[0] == asked:
            result.set_result(session.last[1])
            return
        request = session.request
        if session.waiting is not None or session.number not in self.sessions:
            raise RemoteRefused("the session is busy or gone")
        if seq != session.seq or base != len(request.generated) or request.finished:
            raise RemoteRefused(
                "drafts for another state of the session",
                cause=f"number {seq} behind {base} tokens came, {session.seq} behind {len(request.generated)} was due",
            )
        request.drafts = list(drafts[: request.most_drafts])
        self.engine.loop.add(request)
        session.waiting, session.due = result, asked

    def _settle(self) -> None:
        """Hand out what the last step decided."""
        self._preparations.settle()
        self._audit.settle()
        for session in list(self._by_request.values()):
            request = session.request
            if session.waiting is None and not session.generate:
                continue
            if request.finished or (len(request.generated) > session.told and not request.verifying):
                self._answer(session)

    def _answer(self, session: Session) -> None:
        request = session.request
        if not session.generate and not request.finished:
            self.engine.loop.release(request)  # until more drafts come
        answer: Message | VeriCacheError = request.error or self._verdict(session)
        waiting, session.waiting = session.waiting, None
        if isinstance(answer, Message):
            session.last = (session.due, answer)
        if session.generate:
            session.stream.put(answer)
        if waiting is not None:
            if isinstance(answer, Message):
                waiting.set_result(answer)
            else:
                waiting.set_exception(answer)
        if request.finished:
            self._by_request.pop(request.number, None)
            self._audit.begin(request)

    def _verdict(self, session: Session) -> Message:
        request = session.request
        fresh = list(request.generated[session.told :])
        session.digest, digest = session.digest.after(fresh)
        fields: dict[str, Any] = {
            "session": session.number,
            "seq": session.seq,
            "base": session.told,
            "tokens": fresh,
            "finish": request.output.finish_reason,
            "stop": request.output.stop_reason,
            "digest": digest,
        }
        if request.output.logprobs is not None:
            fields["logprobs"] = [_plain(entry) for entry in request.output.logprobs[session.told :]]
        session.told += len(fresh)
        session.seq += 1
        return Message("verdict", fields)

    def _reap(self) -> None:
        now = time.monotonic()
        for session in list(self.sessions.values()):
            if session.waiting is None and not session.generate and now - session.seen > self.limits.idle:
                log.warning("session %s was silent for %.0f s; closed", session.number[:8], self.limits.idle)
                self._drop(session)

    def _drop(self, session: Session, error: VeriCacheError | None = None) -> None:
        if self.sessions.pop(session.number, None) is None:
            return
        self._by_request.pop(session.request.number, None)
        if session.waiting is not None:
            session.waiting.set_exception(error or RemoteError("the session was closed"))
            session.waiting = None
        session.stream.put(error or RemoteError("the session was closed"))
        self.engine.loop.remove(session.request)
        self._release(session.prefix)

    def _release(self, prefix: Prefix) -> None:
        prefix.users -= 1
        self.shelf.trim()


def _plain(entry: TokenLogprobs) -> list[Any]:
    return [entry.token, entry.logprob, [list(pair) for pair in entry.top]]
