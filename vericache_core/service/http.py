"""The small HTTP side of a service: ``/metrics``, ``/healthz`` and ``/readyz``."""

from __future__ import annotations

import errno
import logging
import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Final, Literal

from vericache_core.errors import ConfigError, UsageError
from vericache_core.service.metrics import Metrics

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("vericache.service")

State = Literal["loading", "ready", "draining", "failed"]
PATIENCE: Final = 10.0
"""Seconds that a connection may stay silent."""
_BAD_ADDRESS: Final = (OSError, UnicodeError, OverflowError)
"""What Python raises for an address: for one that nobody knows or has, a name such as ``a..b``, a port out of range."""


class Service:
    """Answers on its own threads from ``with`` (or :meth:`start`) to the end of it (or :meth:`close`).

    ``/healthz`` is 200 unless the state is ``failed``: a process that drains or loads must not be restarted.
    ``/readyz`` is 200 in the state ``ready`` and 503 in any other, with the state as its text. ``/metrics`` is 404
    without ``metrics``.

    Args:
        host, port: to listen on; port 0 takes a free one.
        metrics: to show.

    Attributes:
        state: begins as ``loading``; :meth:`ready` ends that, `draining` sets ``draining``, what is watched ``failed``.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, metrics: Metrics | None = None) -> None:
        self.metrics = metrics
        self._state: State = "loading"
        self._failed: Callable[[], bool] | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        try:
            self._server = _Server((host, port), self)
        except _BAD_ADDRESS as error:
            raise _taken(f"{host}:{port}", error) from error

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that it listens on."""
        host, port = self._server.server_address[:2]
        return str(host), int(port)

    @property
    def state(self) -> State:
        return "failed" if self._failed is not None and self._failed() else self._state

    @state.setter
    def state(self, state: State) -> None:
        with self._lock:
            self._state = state

    def ready(self) -> None:
        """Say that all is loaded; one that drains or failed meanwhile stays what it is."""
        with self._lock:
            if self._state == "loading":
                self._state = "ready"

    def watch(self, failed: Callable[[], bool]) -> None:
        """Ask ``failed`` with every question from now on: what ended without a word cannot say so itself."""
        self._failed = failed

    def start(self) -> None:
        """Answer from now on."""
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="vericache-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; safe to call twice."""
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._thread = None
        self._server.server_close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def answer(self, path: str, accept: str) -> tuple[int, bytes, str]:
        """Status, body and content type of a request for ``path``."""
        text, state = "text/plain; charset=utf-8", self.state
        if path == "/healthz":
            return (503 if state == "failed" else 200), state.encode(), text
        if path == "/readyz":
            return (200 if state == "ready" else 503), state.encode(), text
        if path == "/metrics" and self.metrics is not None:
            return 200, *self.metrics.render(accept)
        return 404, b"not found", text


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], service: Service) -> None:
        self.service = service
        self.address_family = _family(address[0])
        super().__init__(address, _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """Log what broke a connection; a prober that did not wait for its answer is no news."""
        gone = isinstance(sys.exc_info()[1], ConnectionError)
        log.log(
            logging.DEBUG if gone else logging.ERROR, "a connection broke", extra={"peer": str(client_address)}, exc_info=True
        )


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    timeout = PATIENCE

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        status, content, kind = self.server.service.answer(path, self.headers.get("Accept") or "")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def version_string(self) -> str:
        return "vericache"

    def log_message(self, format: str, *arguments: object) -> None:
        """Probes and scrapes come every few seconds: they are not logged."""


def split_address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT`` or ``[IPV6]:PORT``.

    Raises:
        UsageError: it is neither.
    """
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise UsageError(f"{text!r}: an IPv6 address goes in brackets", hint="[::1]:9431")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"expected HOST:PORT, got {text!r}", hint="0.0.0.0:9431")
    return host, int(port)


def check_free(address: str) -> None:
    """See whether ``HOST:PORT`` can be listened on, for a service that will do so only when its model is loaded.

    It is not held meanwhile: whoever connects to something that cannot answer yet is better refused.

    Raises:
        UsageError: it is no HOST:PORT.
        ConfigError: nothing can listen there.
    """
    host, port = split_address(address)
    failures: list[OSError] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except _BAD_ADDRESS as error:
        raise _taken(address, error) from error
    for family, _, _, _, where in found:
        dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        try:
            socket.create_server(where[:2], family=family, dualstack_ipv6=dual).close()
        except OSError as error:
            failures.append(error)
    # A name may stand for addresses that this machine lacks (::1 without IPv6); one that is taken would answer for us.
    for failure in failures:
        if len(failures) == len(found) or failure.errno == errno.EADDRINUSE:
            raise _taken(address, failure) from failure


def _taken(address: str, error: Exception) -> ConfigError:
    return ConfigError(f"cannot listen on {address}", cause=str(error), hint="another port, or 0 for any")


def _family(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
