"""Talk with a Redis server under a deadline; large replies go straight into the memory they are for.

redis-py makes the connection (addresses, TLS, authentication, database) and sends. Its reader copies a reply several
times and gives each piece of it a timeout of its own, so a server that sends a byte a second holds a caller for hours.
Here every wait on the socket, those of redis-py among them, ends at one deadline.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from vericache_core.errors import MissingDependencyError, StoreError, StoreTimeout, UsageError
from vericache_core.stores.blobs import Buffer
from vericache_core.stores.pieces import length_of

try:
    import redis
    from redis.connection import AbstractConnection, parse_url
except ImportError as _error:
    raise MissingDependencyError("a Redis store needs redis-py", hint="pip install 'vericache[redis]'") from _error

_LINE: Final = 4096
"""Bytes that a status, an error, a number or a length may take."""

_TOLERANCE: Final = 1e-3
"""Seconds before a deadline from which on an error is taken for its effect."""


class DeadlineSocket:
    """A socket whose every wait ends at a deadline, however often the other side sends something.

    A timeout that is set on it counts for each wait as usual; the deadline counts for all of them together.
    """

    def __init__(self, raw: socket.socket, deadline: Callable[[], float]) -> None:
        self._raw, self._deadline = raw, deadline
        self._timeout: float | None = None

    def settimeout(self, timeout: float | None) -> None:
        self._timeout = timeout

    def gettimeout(self) -> float | None:
        return self._timeout

    def recv(self, size: int, flags: int = 0) -> bytes:
        self._arm()
        return self._raw.recv(size, flags)

    def recv_into(self, buffer: memoryview) -> int:
        self._arm()
        return self._raw.recv_into(buffer)

    def sendall(self, data: Buffer) -> None:
        """Send all of it; unlike that of a TLS socket it does not start its timeout anew with every record."""
        with memoryview(data).cast("B") as view:
            sent = 0
            while sent < len(view):
                self._arm()
                sent += self._raw.send(view[sent:])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def _arm(self) -> None:
        left = self._deadline() - time.monotonic()
        if left <= 0:
            raise TimeoutError("past the deadline")
        wait = left if self._timeout is None else min(left, self._timeout)
        self._raw.settimeout(None if math.isinf(wait) else wait)


class _Timed(AbstractConnection):
    """What our connections add to those of redis-py: a deadline for everything, and an abort from another thread."""

    deadline = math.inf
    _sock: Any

    def _connect(self) -> DeadlineSocket:
        left = max(1e-3, self.deadline - time.monotonic())
        self.socket_connect_timeout = self.socket_timeout = left  # until there is a socket to put the deadline on
        raw = super()._connect()  # type: ignore[safe-super,no-untyped-call]  # that of the kind beside us
        sock = DeadlineSocket(raw, lambda: self.deadline)
        self.socket_timeout = None
        return sock

    @property
    def sock(self) -> DeadlineSocket:
        """The socket of an open connection."""
        if self._sock is None:
            raise StoreError("the connection to Redis was closed")
        sock: DeadlineSocket = self._sock
        return sock

    @property
    def connected(self) -> bool:
        """Whether it has a socket; redis-py 7 has no name for that."""
        return self._sock is not None

    @property
    def inherited(self) -> bool:
        """Whether it belongs to the process that forked this one."""
        return self.pid != os.getpid()

    def abort(self) -> None:
        """Wake a thread that waits on this connection; it closes the connection itself, as the owner."""
        sock = self._sock
        if sock is not None and not self.inherited:
            with suppress(OSError):  # not connected any more: nobody waits
                sock.shutdown(socket.SHUT_RDWR)


class _Tcp(_Timed, redis.Connection):
    pass


class _Tls(_Timed, redis.SSLConnection):
    pass


class _Unix(_Timed, redis.UnixDomainSocketConnection):
    pass


_TIMED: Final[dict[type[Any], type[Any]]] = {redis.SSLConnection: _Tls, redis.UnixDomainSocketConnection: _Unix}


class Talk:
    """Commands and replies on a connection, between a look whether it is in step and one whether it still is."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._ahead = b""
        if connection.can_read(timeout=0):
            raise StoreError("Redis sent a reply that nobody asked for")

    def send(self, *commands: Sequence[bytes]) -> None:
        """Send small commands at once."""
        if commands:
            self._connection.send_packed_command([b"".join(map(_packed, commands))], check_health=False)

    def send_long(self, words: Sequence[bytes], last: Sequence[Buffer]) -> None:
        """Send a command whose last word is the concatenation of ``last``, without building it."""
        size = sum(map(length_of, last))
        head = b"*%d\r\n%b$%d\r\n" % (len(words) + 1, b"".join(map(_word, words)), size)
        self._connection.send_packed_command([head, *last, b"\r\n"], check_health=False)

    def status(self) -> None:
        """Read ``+OK``."""
        line = self._line(b"+")
        if line != b"OK":
            raise StoreError("Redis did not say OK", cause=_shown(line))

    def array(self) -> int:
        """Read the length of an array, whose elements come next; -1 for none at all."""
        return _number(self._line(b"*"))

    def integer(self) -> int:
        """Read a number."""
        return _number(self._line(b":"))

    def size(self) -> int | None:
        """Read the length of a bulk reply, whose bytes come next; None for none at all."""
        length = _number(self._line(b"$"))
        if length < -1:
            raise StoreError("Redis answered with a length that is none", cause=str(length))
        return None if length == -1 else length

    def read_into(self, view: memoryview) -> None:
        """Fill ``view`` with what comes next."""
        known = min(len(view), len(self._ahead))
        view[:known] = self._ahead[:known]
        self._ahead = self._ahead[known:]
        while known < len(view):
            got = self._connection.sock.recv_into(view[known:])
            if not got:
                raise StoreError("Redis closed the connection within a reply")
            known += got

    def end_of_bulk(self) -> None:
        """Read what ends a bulk reply."""
        end = bytearray(2)
        self.read_into(memoryview(end))
        if end != b"\r\n":
            raise StoreError("a reply of Redis is longer than it said")

    def finish(self) -> None:
        """Check that nothing is left over, so that the next one to use the connection reads its own reply."""
        if self._ahead:
            raise StoreError("Redis sent more than the reply")

    def _line(self, kind: bytes) -> bytes:
        while b"\r\n" not in self._ahead:
            if len(self._ahead) > _LINE:
                raise StoreError("Redis answered with something that is no reply", cause=_shown(self._ahead))
            more = self._connection.sock.recv(_LINE)
            if not more:
                raise StoreError("Redis closed the connection instead of a reply")
            self._ahead += more
        line, _, self._ahead = self._ahead.partition(b"\r\n")
        if line[:1] == b"-":
            raise RedisRefusal("Redis refused", cause=_shown(line[1:]))
        if line[:1] != kind:
            raise StoreError("Redis answered something else", cause=_shown(line))
        return line[1:]


class RedisRefusal(StoreError):
    """An error reply; the cause is what the server said."""


class Connections:
    """Connections to one server: kept while they are in step, thrown away after anything odd.

    Args:
        url: ``redis://``, ``rediss://`` (TLS) or ``unix://``, as redis-py reads it.
        options: more arguments of redis-py's connection, such as ``ssl_ca_certs``.
    """

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        try:
            known: dict[str, Any] = dict(parse_url(url))  # type: ignore[no-untyped-call]
        except ValueError as error:
            raise UsageError("this is no address of a Redis server", cause=str(error)) from error
        self._kind = _TIMED.get(known.pop("connection_class", redis.Connection), _Tcp)
        # RESP 2, as the third version may push messages between replies.
        self._options = {**known, **options, "protocol": 2}
        self._lock = threading.Lock()
        self._idle: list[Any] = []
        self._busy: set[Any] = set()
        self._closed = False

    @contextmanager
    def talk(self, deadline: float) -> Iterator[Talk]:
        """A connection that is in step, for one exchange; kept afterwards unless something was raised.

        Raises:
            StoreTimeout: the deadline passed inside.
            StoreError: the server cannot be reached, or what redis-py or the exchange raised.
        """
        connection = self._take()
        connection.deadline = deadline
        try:
            connection.connect()
            talk = Talk(connection)
            yield talk
            talk.finish()
        except BaseException as error:
            self._drop(connection)
            if isinstance(error, (OSError, redis.RedisError)):
                # By the clock and not by the error: a timeout of TCP itself may come long before the deadline.
                if time.monotonic() >= deadline - _TOLERANCE:
                    raise StoreTimeout("Redis did not answer in time") from error
                raise StoreError("Redis is out of reach", cause=str(error)) from error
            raise
        self._keep(connection)

    def close(self) -> None:
        """Close what is idle, and wake those who wait on the rest; they close it."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for connection in idle:
            connection.disconnect()
        for connection in busy:
            connection.abort()

    def _take(self) -> Any:
        while True:
            with self._lock:
                if self._closed:
                    raise StoreError("the Redis store was closed")
                connection = self._idle.pop() if self._idle else self._kind(**self._options)
                self._busy.add(connection)
            if not connection.inherited and (not connection.connected or _in_step(connection)):
                return connection
            # Of the process that forked this one, closed by the server, or with a late reply for somebody else.
            self._drop(connection)

    def _keep(self, connection: Any) -> None:
        with self._lock:
            self._busy.discard(connection)
            if not self._closed:
                self._idle.append(connection)
                return
        connection.disconnect()

    def _drop(self, connection: Any) -> None:
        connection.disconnect()
        with self._lock:
            self._busy.discard(connection)


def _in_step(connection: Any) -> bool:
    connection.deadline = math.inf  # looking does not wait
    try:
        return not connection.can_read(timeout=0)
    except (OSError, redis.RedisError):
        return False


def _packed(words: Sequence[bytes]) -> bytes:
    return b"*%d\r\n%b" % (len(words), b"".join(map(_word, words)))


def _word(word: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(word), word)


def _number(text: bytes) -> int:
    digits = text[1:] if text[:1] == b"-" else text
    if not digits.isdigit() or len(digits) > 19:
        raise StoreError("Redis answered with a number that is none", cause=_shown(text))
    return int(text)


def _shown(text: bytes) -> str:
    return repr(text[:80])[2:-1]
