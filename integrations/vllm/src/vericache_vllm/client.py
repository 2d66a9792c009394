"""The verifier at the other end of HTTP: a vLLM server with our route."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import socket
import ssl
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from vericache_core.errors import ConfigError, RemoteError
from vericache_core.service.access import is_loopback
from vericache_vllm.verdict import MOST_BYTES, PATH, PROTOCOL, Check, Verdict


class HttpVerifier:
    """Verifies on a server. Redirects are refused and proxies of the environment not asked: both would see the token.

    Args:
        url: of the server, such as ``https://verifier:8000``.
        token: its ``VERICACHE_TOKEN``.
        salt: isolates cached KV of these requests from that of others.
        seconds: longest wait for an answer, however slowly it comes in.
        tries: attempts when the link fails; asking twice is harmless, since a verdict depends on the tokens alone.
        tls: trusts a server's certificate; the system's authorities if not given.
        plaintext: lets the token go to another machine without TLS, where something else guards the link.

    Raises:
        ConfigError: the URL is none or may not be used, or the server speaks another protocol.
        RemoteError: it refuses the token, or does not answer.
    """

    def __init__(
        self,
        url: str,
        token: str,
        salt: str | None = None,
        seconds: float = 60.0,
        tries: int = 3,
        *,
        tls: ssl.SSLContext | None = None,
        plaintext: bool = False,
    ) -> None:
        self._host, self._port, self._prefix, secure = _parts(url)
        if not (secure or plaintext or is_loopback(f"[{self._host}]:0")):
            raise ConfigError(
                f"{url} would send the token in the clear",
                cause="http:// leaves this machine without TLS",
                hint="https://, or plaintext=True where something else guards the link",
            )
        self._tls = (tls or ssl.create_default_context()) if secure else None
        self._url, self._token, self._salt = url, token, salt
        self._seconds, self._tries = seconds, max(1, tries)
        facts = self._ask(None)
        if facts.get("protocol") != PROTOCOL:
            raise ConfigError(f"the verifier speaks protocol {facts.get('protocol')}, this client {PROTOCOL}")
        try:
            self.max_model_len, self.vocab_size = _count(facts, "max_model_len"), _count(facts, "vocab_size")
        except (KeyError, ValueError) as error:
            raise RemoteError(
                "the verifier does not say how long a request may be, of which tokens", cause=repr(error)
            ) from error

    def verify(self, checks: Sequence[Check]) -> list[Verdict]:
        if not checks:
            return []
        body = {
            "protocol": PROTOCOL,
            "checks": [{"verified": list(check.verified), "drafts": list(check.drafts)} for check in checks],
            "salt": self._salt,
        }
        answer = self._ask(body)
        verdicts = answer.get("verdicts")
        if not isinstance(verdicts, list) or len(verdicts) != len(checks):
            raise RemoteError(f"the verifier did not answer {len(checks)} checks with as many verdicts")
        return [_verdict(check, verdict, self.vocab_size) for check, verdict in zip(checks, verdicts, strict=True)]

    def _ask(self, body: Mapping[str, Any] | None) -> dict[str, Any]:
        for attempt in range(1, self._tries + 1):
            try:
                status, raw = self._ask_once(body)
            except (OSError, http.client.HTTPException) as error:
                if attempt == self._tries:
                    raise RemoteError(f"the verifier at {self._url} does not answer", cause=str(error)) from error
                time.sleep(0.1 * 2**attempt)
                continue
            if status != http.client.OK:
                raise RemoteError(f"the verifier refuses with status {status}", cause=raw[:1000].decode(errors="replace"))
            return _object(raw)
        raise AssertionError  # the last attempt returned or raised

    def _ask_once(self, body: Mapping[str, Any] | None) -> tuple[int, bytes]:
        """Status and body of one answer; ``OSError`` where there is none in time."""
        if self._tls is None:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=self._seconds)
        else:
            connection = http.client.HTTPSConnection(self._host, self._port, timeout=self._seconds, context=self._tls)
        late = threading.Event()

        def give_up() -> None:
            late.set()
            if connection.sock is not None:
                with contextlib.suppress(OSError):  # it may end at this very moment
                    connection.sock.shutdown(socket.SHUT_RDWR)

        # The connection's own timeout begins anew with every byte.
        watch = threading.Timer(self._seconds, give_up)
        watch.start()
        try:
            found = self._exchange(connection, body)
        except (OSError, http.client.HTTPException):
            if not late.is_set():
                raise
        finally:
            watch.cancel()
            connection.close()
        if late.is_set():
            raise TimeoutError(f"no whole answer within {self._seconds:g} s")
        return found

    def _exchange(self, connection: http.client.HTTPConnection, body: Mapping[str, Any] | None) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        connection.request("GET" if data is None else "POST", self._prefix + PATH, data, headers)
        answer = connection.getresponse()
        raw = answer.read(MOST_BYTES + 1)
        if answer.length and len(raw) <= MOST_BYTES:  # it does not raise for this itself
            raise http.client.IncompleteRead(raw, answer.length)
        return answer.status, raw


def _parts(url: str) -> tuple[str, int | None, str, bool]:
    """Host, port, path in front of ours, and whether there is TLS."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{url!r} is no URL of a verifier", cause=str(error)) from error
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or parts.username:
        raise ConfigError(f"a verifier's URL is http://HOST:PORT or https://HOST:PORT, got {url!r}")
    return host, port, parts.path.rstrip("/"), parts.scheme == "https"


def _object(raw: bytes) -> dict[str, Any]:
    """The JSON object in an answer."""
    if len(raw) > MOST_BYTES:
        raise RemoteError(f"the verifier's answer has more than {MOST_BYTES} bytes")
    try:
        found = json.loads(raw)
    except ValueError as error:
        raise RemoteError("the verifier's answer makes no sense", cause=str(error)) from error
    if not isinstance(found, dict):
        raise RemoteError("the verifier's answer makes no sense", cause="it is no JSON object")
    return found


def _verdict(check: Check, wire: Any, vocab_size: int) -> Verdict:
    """Read one verdict; nothing in it is taken on trust."""
    try:
        verdict = Verdict(
            accepted=_count(wire, "accepted"),
            token=None if wire["token"] is None else _count(wire, "token"),
            margins=tuple(float(margin) for margin in wire["margins"]),
            cached=_count(wire, "cached"),
            reruns=_count(wire, "reruns"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RemoteError("a verdict makes no sense", cause=str(error)) from error
    if verdict.accepted > len(check.drafts):
        raise RemoteError(f"a verdict accepts {verdict.accepted} of {len(check.drafts)} drafts")
    if verdict.token is not None and verdict.token >= vocab_size:
        raise RemoteError(f"a verdict names token {verdict.token} of a vocabulary of {vocab_size}")
    if not all(math.isfinite(margin) and margin >= 0 for margin in verdict.margins):
        raise RemoteError("a verdict's margins make no sense", cause=str(verdict.margins))
    return verdict


def _count(wire: Mapping[str, Any], name: str) -> int:
    """A whole number of 0 or more; neither ``2.9`` nor ``"2"`` nor ``true`` is one."""
    value = wire[name]
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {value!r}")
    return value
