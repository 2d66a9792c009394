"""The drafting side's end of the link: one gRPC channel, methods of the store, errors as ours."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import grpc

from vericache_core.config import EngineConfig
from vericache_core.errors import ConfigError, RemoteError, RemoteRefused
from vericache_core.remote.auth import HEADER, channel_credentials
from vericache_core.remote.frames import MOST_MESSAGE, SERVICE, Message, decode
from vericache_core.service.access import SCHEME, is_loopback, own_token
from vericache_core.service.http import split_address

_REFUSALS: Final = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
    }
)
_LEAST_CONNECT: Final = 5.0
"""Least seconds for one attempt to connect: several round trips, with TLS."""
_MOST_CONNECT: Final = 20.0
"""Most seconds for it, which is also what gRPC takes by itself."""


class Link:
    """Talks to one store.

    Args:
        address: ``HOST:PORT``.
        token: shown with every call.
        credentials: TLS, or ``None``.
        timeout: seconds that an answer, or the next message of a stream, may take.
    """

    def __init__(self, address: str, token: str | None, credentials: Any, timeout: float) -> None:
        self.address, self.timeout = address, timeout
        self._metadata = () if token is None else ((HEADER, SCHEME + token),)
        options = [
            ("grpc.max_receive_message_length", MOST_MESSAGE),
            ("grpc.max_send_message_length", MOST_MESSAGE),
            ("grpc.enable_retries", 0),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 2000),
            # Despite its name, how long gRPC tries to connect. It does so even after the channel was closed, if the other end
            # accepts and says nothing.
            ("grpc.min_reconnect_backoff_ms", int(min(max(_LEAST_CONNECT, timeout), _MOST_CONNECT) * 1000)),
            ("grpc.keepalive_time_ms", 20000),
            ("grpc.keepalive_timeout_ms", int(max(1.0, timeout) * 1000)),
        ]
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options)
        else:
            self._channel = grpc.secure_channel(address, credentials, options)

    @classmethod
    def from_config(cls, config: EngineConfig) -> Link:
        """The link that an engine's configuration asks for.

        Raises:
            ConfigError: it would send the token or KV in clear text to another machine.
            UsageError: no HOST:PORT, or a file that cannot be used.
        """
        assert config.remote is not None
        split_address(config.remote)
        if config.remote_ca is None and not config.remote_plaintext and not is_loopback(config.remote):
            raise ConfigError(
                f"the link to {config.remote} would not be encrypted",
                hint="set remote_ca, or remote_plaintext where something else guards the link",
            )
        token = None if config.remote_token_file is None else own_token(config.remote_token_file)
        credentials = None
        if config.remote_ca is not None:
            credentials = channel_credentials(config.remote_ca, config.remote_cert, config.remote_key)
        return cls(config.remote, token, credentials, config.remote_timeout)

    def ask(self, method: str, message: Message, timeout: float | None = None) -> Message:
        """Call a method and wait for its answer.

        Raises:
            RemoteRefused: the store says no.
            RemoteError: no answer in time, or none that makes sense.
        """
        call = self._channel.unary_unary(f"/{SERVICE}/{method}")
        try:
            data = call(message.encode(), timeout=timeout or self.timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self.translated(error, method) from None
        return decode(data)

    def ask_later(self, method: str, message: Message, done: Callable[[Message | RemoteError], None]) -> Any:
        """Call a method; ``done`` gets the answer, or why there is none, on another thread."""

        def ended(future: Any) -> None:
            answer: Message | RemoteError
            try:
                answer = decode(future.result())
            except (grpc.RpcError, grpc.FutureCancelledError) as error:
                answer = self.translated(error, method)
            except RemoteError as error:
                answer = error
            done(answer)

        call = self._channel.unary_unary(f"/{SERVICE}/{method}")
        future = call.future(message.encode(), timeout=self.timeout, metadata=self._metadata)
        future.add_done_callback(ended)
        return future

    def stream(self, method: str, message: Message) -> Stream:
        """Call a method that answers with many messages."""
        call = self._channel.unary_stream(f"/{SERVICE}/{method}")
        return Stream(self, method, call(message.encode(), metadata=self._metadata))

    def translated(self, error: Any, method: str) -> RemoteError:
        """Return an error of gRPC as one of ours."""
        code = error.code() if isinstance(error, grpc.RpcError) else grpc.StatusCode.CANCELLED
        details = (error.details() or "") if isinstance(error, grpc.RpcError) else ""
        if code in _REFUSALS:
            return RemoteRefused(f"the store at {self.address} refuses {method}", cause=details)
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return RemoteError(f"the store at {self.address} did not answer {method} in {self.timeout:g} s")
        hint = None
        if code is grpc.StatusCode.UNAVAILABLE and "failed to connect" in details:
            hint = "is `vericache store serve` up there, and do both sides have the same idea of TLS and client certificates?"
        return RemoteError(f"the store at {self.address} failed in {method}", cause=f"{code.name}: {details[:300]}", hint=hint)

    def close(self) -> None:
        """Hang up; calls under way end with an error. An attempt to connect that is under way ends when its time is over."""
        self._channel.close()


class Stream:
    """Messages of one call, in order. :meth:`check` hangs up when none came for too long."""

    def __init__(self, link: Link, method: str, call: Any) -> None:
        self._link, self._method, self._call = link, method, call
        self.heard = time.monotonic()
        self.silent = False

    def __iter__(self) -> Iterator[Message]:
        try:
            for data in self._call:
                self.heard = time.monotonic()
                yield decode(data)
        except grpc.RpcError as error:
            if self.silent:
                raise RemoteError(
                    f"the store at {self._link.address} fell silent in {self._method} for {self._link.timeout:g} s"
                ) from None
            raise self._link.translated(error, self._method) from None
        finally:
            self._call.cancel()

    def check(self, now: float) -> None:
        """Hang up if nothing was heard for the link's timeout."""
        if now - self.heard > self._link.timeout:
            self.silent = True
            self._call.cancel()

    def cancel(self) -> None:
        """Hang up."""
        self._call.cancel()
