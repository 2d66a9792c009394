"""The verifier at the other end of HTTP: a vLLM server with our route."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from vericache_core.errors import ConfigError, RemoteError
from vericache_vllm.verdict import PATH, PROTOCOL, Check, Verdict

MOST_BYTES = 1 << 24
"""An answer longer than this is refused before it is read whole."""


class HttpVerifier:
    """Verifies on a server.

    Args:
        url: of the server, such as ``http://127.0.0.1:8000``.
        token: its ``VERICACHE_TOKEN``.
        salt: isolates cached KV of these requests from that of others.
        seconds: longest wait for an answer.
        tries: attempts when the link fails; asking twice is harmless, since a verdict depends on the tokens alone.

    Raises:
        ConfigError: the URL is none, or the server speaks another protocol.
        RemoteError: it refuses the token, or does not answer.
    """

    def __init__(self, url: str, token: str, salt: str | None = None, seconds: float = 60.0, tries: int = 3) -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise ConfigError(f"a verifier's URL starts with http:// or https://, got {url!r}")
        self._url, self._token, self._salt = url.rstrip("/") + PATH, token, salt
        self._seconds, self._tries = seconds, max(1, tries)
        facts = self._ask(None)
        if facts.get("protocol") != PROTOCOL:
            raise ConfigError(f"the verifier speaks protocol {facts.get('protocol')}, this client {PROTOCOL}")
        try:
            self.max_model_len = int(facts["max_model_len"])
        except (KeyError, TypeError, ValueError) as error:
            raise RemoteError("the verifier does not say how long a request may be", cause=repr(error)) from error

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
        return [_verdict(check, verdict) for check, verdict in zip(checks, verdicts, strict=True)]

    def _ask(self, body: Mapping[str, Any] | None) -> dict[str, Any]:
        for attempt in range(1, self._tries + 1):
            try:
                return self._ask_once(body)
            except urllib.error.HTTPError as error:  # an answer, and it is no
                detail = error.read(1000).decode(errors="replace")
                raise RemoteError(f"the verifier refuses with status {error.code}", cause=detail) from error
            except (OSError, http.client.HTTPException) as error:
                if attempt == self._tries:
                    raise RemoteError(f"the verifier at {self._url} does not answer", cause=str(error)) from error
                time.sleep(0.1 * 2**attempt)
        raise AssertionError  # the last attempt returned or raised

    def _ask_once(self, body: Mapping[str, Any] | None) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url, data=data)  # noqa: S310 (the scheme was checked)
        request.add_header("Authorization", f"Bearer {self._token}")
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=self._seconds) as answer:  # noqa: S310
            raw = answer.read(MOST_BYTES + 1)
        return _object(raw)


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


def _verdict(check: Check, wire: Any) -> Verdict:
    """Read one verdict; nothing in it is taken on trust."""
    try:
        token = wire["token"]
        verdict = Verdict(
            accepted=int(wire["accepted"]),
            token=None if token is None else int(token),
            margins=tuple(float(margin) for margin in wire["margins"]),
            cached=int(wire["cached"]),
            reruns=int(wire["reruns"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RemoteError("a verdict makes no sense", cause=str(error)) from error
    if not 0 <= verdict.accepted <= len(check.drafts):
        raise RemoteError(f"a verdict accepts {verdict.accepted} of {len(check.drafts)} drafts")
    return verdict
