"""The store's gRPC service: raw bytes in, raw bytes out, everything about tokens left to the verifier.

Methods (``/vericache.Store/<name>``): ``hello`` compares what both sides run; ``open`` makes a session and streams its
first verdict (all verdicts, where the store generates) and, if asked to, KV of its prefix at once; ``prefix`` and ``rows``
stream compressed and full KV to a session that is open;
``verify`` answers drafts; ``close`` ends a session; ``offer`` names the compressor that the store is set up with; ``echo``
returns bytes, to measure the link.
"""

from __future__ import annotations

import concurrent.futures
import logging
import queue
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, NoReturn, TypeVar

import grpc

from vericache_core.engine import Engine
from vericache_core.errors import RemoteError, RemoteRefused, UsageError, VeriCacheError
from vericache_core.remote.auth import Guard
from vericache_core.remote.frames import MOST_MESSAGE, SERVICE, BadMessageError, Message, decode, ids_from_bytes
from vericache_core.remote.identity import Facts, facts_of, refuse_differences
from vericache_core.remote.layers import Blob, missing_blob, parts
from vericache_core.remote.limits import Limits
from vericache_core.remote.prepare import Ask
from vericache_core.remote.verifier import Session, Verifier
from vericache_core.runtime.sampling_params import SamplingParams

log = logging.getLogger("vericache.remote")
BEAT: Final = 1.0
"""Seconds between signs of life while a prefix is computed."""
PATIENCE: Final = 600.0
"""Seconds that a call may wait for a verdict, whatever its caller says."""
MOST_ECHO: Final = 4 << 20
T = TypeVar("T")


class StoreServer:
    """Serves one engine on ``address``, from :meth:`start` on: nobody is let in to wait for prefixes that are made before.

    Args:
        engine: owned from now on; :meth:`stop` closes it.
        address: ``HOST:PORT``; port 0 takes a free one.
        guard: lets callers in.
        credentials: TLS, or ``None``.
        limits: what is taken on.

    Attributes:
        port: that it listens on, once it is started.
    """

    def __init__(
        self, engine: Engine, address: str, guard: Guard, credentials: Any = None, limits: Limits | None = None
    ) -> None:
        self.limits = limits or Limits()
        self._engine, self._guard, self._address, self._credentials = engine, guard, address, credentials
        self.facts: Facts = facts_of(engine)
        self.verifier = Verifier(engine, self.limits)
        options = [
            ("grpc.max_receive_message_length", MOST_MESSAGE),
            ("grpc.max_send_message_length", MOST_MESSAGE),
            ("grpc.max_metadata_size", 8192),
            ("grpc.so_reuseport", 0),
        ]
        self._pool = ThreadPoolExecutor(min(self.limits.calls, self.limits.sessions + 32), "vericache-store")
        self._server = grpc.server(
            self._pool,
            interceptors=[guard],
            options=options,
            maximum_concurrent_rpcs=self.limits.calls,
        )
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        handlers = {
            "hello": unary(self._answering(self._hello)),
            "open": stream(self._streaming(self._open)),
            "prefix": stream(self._streaming(self._prefix)),
            "rows": stream(self._streaming(self._rows)),
            "verify": unary(self._answering(self._verify)),
            "close": unary(self._answering(self._close)),
            "offer": unary(self._answering(self._offer)),
            "echo": unary(self._answering(self._echo)),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.port = 0

    def start(self) -> None:
        """Begin to listen and to answer.

        Raises:
            UsageError: the address cannot be had; the server is to be stopped all the same.
        """
        try:
            if self._credentials is None:
                self.port = self._server.add_insecure_port(self._address)
            else:
                self.port = self._server.add_secure_port(self._address, self._credentials)
        except RuntimeError as error:
            raise UsageError(f"cannot listen on {self._address}", cause=str(error).splitlines()[0]) from error
        self._server.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the server has stopped, or for ``seconds``; True if time ran out."""
        return bool(self._server.wait_for_termination(seconds))

    def stop(self, grace: float | None = None) -> None:
        """Take no new calls, give those under way ``grace`` seconds, and let everything go."""
        self._server.stop(grace).wait()
        self.verifier.close()
        self._pool.shutdown()
        self._engine.close()

    # -- methods -------------------------------------------------------------------------------------

    def _hello(self, message: Message, _tenant: str, _context: Any) -> Message:
        refuse_differences(self.facts, message.table("facts"))
        return Message("welcome", {"facts": self.facts, "tokens": self.limits.tokens, "drafts": self.limits.drafts})

    def _offer(self, _message: Message, _tenant: str, _context: Any) -> Message:
        config = self._engine.config
        return Message("offer", {"compressor": config.compressor, "options": config.compressor_options()})

    def _echo(self, message: Message, _tenant: str, _context: Any) -> Message:
        return Message("echo", {}, bytes(message.number("bytes", 0, MOST_ECHO)))

    def _open(self, message: Message, tenant: str, context: Any) -> Iterator[Message]:
        ask = self._ask(message, tenant)
        send = None if message.fields.get("send") is None else message.text("send", 16)
        prefix = yield from self._waiting(self.verifier.prepare(ask), context, self.verifier.release)
        session = yield from self._waiting(self.verifier.open(ask, prefix), context, self.verifier.close_session)
        delivered = False

        def ended() -> None:
            if session.generate or not delivered:
                self.verifier.close_session(session)

        if not context.add_callback(ended):
            ended()
            return
        sizes = [len(blob.data) for blob in prefix.blobs]
        full_bytes = sum(layer.token_bytes for layer in self._engine.adapter.layers) * prefix.tokens
        facts = {"session": session.number, "tokens": prefix.tokens, "bytes": sum(sizes), "full_bytes": full_bytes}
        yield Message("opened", facts)
        if session.generate:
            yield from self._generated(session, context)
            return
        for part in () if send is None else self._parts(session, send, message):
            if not delivered and session.first.done():  # it is not to wait for the end of a long transfer
                delivered = True
                yield session.first.result()
            yield part
        if not delivered:
            verdict = yield from self._waiting(session.first, context, lambda _: None)
            delivered = True
            yield verdict

    def _generated(self, session: Session, context: Any) -> Iterator[Message]:
        while context.is_active():
            try:
                answer = session.stream.get(timeout=BEAT)
            except queue.Empty:
                yield Message("beat", {})
                continue
            if isinstance(answer, VeriCacheError):
                raise answer
            yield answer
            if answer.fields["finish"] is not None:
                return

    def _prefix(self, message: Message, tenant: str, _context: Any) -> Iterator[Message]:
        return self._parts(self.verifier.find(tenant, message.text("session", 64)), "prefix", message)

    def _rows(self, message: Message, tenant: str, _context: Any) -> Iterator[Message]:
        return self._parts(self.verifier.find(tenant, message.text("session", 64)), "rows", message)

    def _parts(self, session: Session, what: str, message: Message) -> Iterator[Message]:
        """Compressed KV of a session's prefix (``prefix``), or full KV (``rows``) but for what the drafter has."""
        prefix = session.prefix
        maps = prefix.maps if message.number("compressed", 0, 1) else {}
        if what == "prefix":
            blobs: Iterator[tuple[int, Blob]] = enumerate(prefix.blobs)
        elif what == "rows":
            layers = range(len(self._engine.adapter.layers))
            blobs = ((layer, missing_blob(prefix.full, layer, maps.get(layer))) for layer in layers)
        else:
            raise BadMessageError(f"a prefix has no {what!r} to send")
        for part in parts(blobs):
            self.verifier.touch(session)
            yield part

    def _verify(self, message: Message, tenant: str, context: Any) -> Message:
        session = self.verifier.find(tenant, message.text("session", 64))
        drafts = message.numbers("drafts", 0, self._engine.adapter.vocab_size - 1, self.limits.drafts)
        seq, base = message.number("seq", 0, 1 << 40), message.number("base", 0, self.limits.tokens)
        return self.verifier.verify(session, seq, base, drafts).result(min(PATIENCE, context.time_remaining() or PATIENCE))

    def _close(self, message: Message, tenant: str, _context: Any) -> Message:
        self.verifier.close_session(self.verifier.find(tenant, message.text("session", 64)))
        return Message("closed", {})

    def _ask(self, message: Message, tenant: str) -> Ask:
        refuse_differences(self.facts, message.table("facts"))
        ids = ids_from_bytes(message.payload, self._engine.adapter.vocab_size, self.limits.tokens)
        if len(ids) < 2:
            raise RemoteRefused("a prompt of fewer than two tokens has no prefix to share")
        params = SamplingParams.from_mapping(message.table("params"))
        if len(ids) + params.max_new_tokens > self.limits.tokens:
            raise RemoteRefused(f"more than {self.limits.tokens} tokens with the answer", hint="the store takes no longer ones")
        self._engine.builder.check_length(len(ids), params)
        name = message.fields.get("compressor")
        compressor = None if name is None else message.text("compressor", 256)
        return Ask(
            tenant,
            tuple(ids),
            message.number("prefix", 1, len(ids) - 1),
            compressor,
            message.table("options"),
            params,
            bool(message.number("generate", 0, 1)),
            bool(message.number("stateless", 0, 1)),
        )

    # -- around methods ------------------------------------------------------------------------------

    def _waiting(self, future: Future[T], context: Any, undo: Callable[[T], Any]) -> Generator[Message, None, T]:
        """Wait with signs of life; when the client goes meanwhile, what comes of it is undone."""
        try:
            while context.is_active():
                try:
                    return future.result(BEAT)
                except concurrent.futures.TimeoutError:
                    done, total = self.verifier.progress()
                    yield Message("beat", {"done": done, "total": total})
        except GeneratorExit:
            _undo_later(future, undo)
            raise
        _undo_later(future, undo)
        raise RemoteError("the client has gone")

    def _answering(self, method: Callable[[Message, str, Any], Message]) -> Callable[[bytes, Any], bytes]:
        def answer(data: bytes, context: Any) -> bytes:
            try:
                return method(decode(data), self._guard.caller(context), context).encode()
            except concurrent.futures.TimeoutError:
                context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "not done in time")
            except VeriCacheError as error:
                _abort(context, error)
            raise AssertionError("abort raises")

        return answer

    def _streaming(self, method: Callable[[Message, str, Any], Iterator[Message]]) -> Callable[[bytes, Any], Iterator[bytes]]:
        def answer(data: bytes, context: Any) -> Iterator[bytes]:
            try:
                for message in method(decode(data), self._guard.caller(context), context):
                    yield message.encode()
            except VeriCacheError as error:
                _abort(context, error)

        return answer


def _undo_later(future: Future[T], undo: Callable[[T], Any]) -> None:
    future.add_done_callback(lambda done: None if done.exception() else undo(done.result()))


def _abort(context: Any, error: VeriCacheError) -> NoReturn:
    if isinstance(error, RemoteRefused):
        code = grpc.StatusCode.FAILED_PRECONDITION
    elif isinstance(error, UsageError | BadMessageError):
        code = grpc.StatusCode.INVALID_ARGUMENT
    else:
        code = grpc.StatusCode.INTERNAL
    text = str(error).encode("utf-8", "replace")[:2000].decode("utf-8", "ignore")  # it travels in a header
    context.abort(code, text)
    raise AssertionError("abort raises")
