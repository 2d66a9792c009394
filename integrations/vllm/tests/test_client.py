"""HTTP between drafter and verifier, without an engine: servers at fault, addresses that are refused, strangers."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import types
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from vericache_core.errors import ConfigError, RemoteError
from vericache_vllm import endpoint
from vericache_vllm.client import HttpVerifier
from vericache_vllm.verdict import MOST_BYTES, PATH, PROTOCOL, Check, Verdict

TOKEN = "a token of this test"
FACTS = {"protocol": PROTOCOL, "max_model_len": 512, "vocab_size": 100, "model": "m"}
RIGHT = {"accepted": 1, "token": 9, "margins": [0.5], "cached": 0, "reruns": 0}
PATIENCE = 60.0
Act = Callable[[socket.socket, threading.Event], None]


def answer(body: Any, status: str = "200 OK", more: str = "") -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\n{more}Content-Length: {len(raw)}\r\n\r\n".encode() + raw


@contextmanager
def server(*acts: bytes | Act) -> Iterator[tuple[str, list[bytes]]]:
    """Answers GET with facts and the n-th POST with the n-th of ``acts``, the last one again and again."""
    asked: list[bytes] = []
    ended = threading.Event()
    posts = iter(acts)
    last: list[bytes | Act] = []

    def serve(connection: socket.socket) -> None:
        with connection:
            head = b""
            while b"\r\n\r\n" not in head:
                got = connection.recv(65536)
                if not got:
                    return
                head += got
            asked.append(head)
            if head.startswith(b"GET"):
                connection.sendall(answer(FACTS))
                return
            last[:] = [next(posts, *last)]
            if isinstance(last[0], bytes):
                connection.sendall(last[0])
            else:
                last[0](connection, ended)

    def listen() -> None:
        threads = []
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                break
            threads.append(threading.Thread(target=_quietly, args=(serve, connection)))
            threads[-1].start()
        for thread in threads:
            thread.join(PATIENCE)

    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=listen)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
    finally:
        ended.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(PATIENCE)
        assert not thread.is_alive()


def _quietly(serve: Callable[[socket.socket], None], connection: socket.socket) -> None:
    try:
        serve(connection)
    except OSError:
        connection.close()  # the client has hung up


def drip(raw: bytes) -> Act:
    """A byte at a time, each well within the timeout of one read."""

    def act(connection: socket.socket, ended: threading.Event) -> None:
        for byte in raw:
            connection.sendall(bytes([byte]))
            if ended.wait(0.05):
                return

    return act


def silent(connection: socket.socket, ended: threading.Event) -> None:
    ended.wait(PATIENCE)


def closing(raw: bytes) -> Act:
    def act(connection: socket.socket, ended: threading.Event) -> None:
        connection.sendall(raw)

    return act


def ask(url: str, tries: int = 1, seconds: float = 1.0) -> list[Verdict]:
    return HttpVerifier(url, TOKEN, seconds=seconds, tries=tries).verify([Check([1, 2], [3, 4])])


GOOD = answer({"protocol": PROTOCOL, "verdicts": [RIGHT]})


def test_an_answer() -> None:
    with server(GOOD) as (url, asked):
        assert ask(url) == [Verdict(1, 9, (0.5,), 0, 0)]
    assert [head.split(b" ")[:2] for head in asked] == [[b"GET", PATH.encode()], [b"POST", PATH.encode()]]


@pytest.mark.parametrize(
    "act",
    [drip(GOOD + b" " * 1000), drip(GOOD[:40] + b"X-Long: " + b"x" * 1000), silent, closing(b""), closing(GOOD[:-20])],
    ids=["drip", "drip-headers", "silent", "closes", "truncated"],
)
def test_a_server_that_does_not_answer_whole_and_in_time_is_given_up(act: Act) -> None:
    """The drips would take a minute, and no read of theirs would wait for long."""
    with server(act) as (url, asked), pytest.raises(RemoteError, match="does not answer"):
        ask(url)
    assert len(asked) == 2
    with server(closing(GOOD[:-20]), GOOD) as (url, asked):
        assert ask(url, tries=2) == [Verdict(1, 9, (0.5,), 0, 0)]
    assert len(asked) == 3


def verdicts(*wire: Any) -> bytes:
    return answer({"protocol": PROTOCOL, "verdicts": list(wire)})


@pytest.mark.parametrize(
    "raw",
    [
        answer([]),
        answer(b"\xff"),
        answer({}),
        verdicts(),
        verdicts(RIGHT, RIGHT),
        verdicts({**RIGHT, "accepted": 3}),
        verdicts({**RIGHT, "accepted": 1.9}),
        verdicts({**RIGHT, "accepted": "1"}),
        verdicts({**RIGHT, "accepted": True}),
        verdicts({**RIGHT, "token": 100}),
        verdicts({**RIGHT, "token": -1}),
        verdicts({**RIGHT, "token": 9.5}),
        verdicts({**RIGHT, "margins": [float("nan")]}),
        verdicts({**RIGHT, "margins": [-1.0]}),
        verdicts({**RIGHT, "margins": None}),
        verdicts({**RIGHT, "cached": -1}),
        verdicts(None),
        answer(b"1" * (MOST_BYTES + 1)),
        answer({"detail": "busy"}, "503 Service Unavailable"),
    ],
)
def test_an_answer_that_makes_no_sense_is_no_verdict(raw: bytes) -> None:
    with server(raw) as (url, _), pytest.raises(RemoteError):
        ask(url, tries=3, seconds=PATIENCE)


def test_the_token_follows_no_redirect() -> None:
    with server(GOOD) as (elsewhere, told):
        moved = answer({}, "307 Temporary Redirect", f"Location: {elsewhere}{PATH}\r\n")
        with server(moved) as (url, _), pytest.raises(RemoteError, match="307"):
            ask(url)
    assert told == []


@pytest.mark.parametrize("url", ["http://verifier:8000", "http://10.0.0.5:8000", "http://[2001:db8::1]:8000"])
def test_the_token_leaves_the_machine_over_tls_only(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="in the clear"):
        HttpVerifier(url, TOKEN)
    monkeypatch.setattr(HttpVerifier, "_ask", lambda *_: FACTS)
    assert HttpVerifier(url, TOKEN, plaintext=True).max_model_len == 512
    assert HttpVerifier(url.replace("http:", "https:"), TOKEN)._tls is not None
    for near in ("http://localhost:1", "http://[::1]:1", "http://127.0.0.1"):
        assert HttpVerifier(near, TOKEN)._tls is None


@pytest.mark.parametrize(
    "url", ["", "verifier:8000", "ftp://verifier", "http://", "http://h:99999", "http://h?x=1", "http://me:secret@h"]
)
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        HttpVerifier(url, TOKEN)


# -- the route's door ---------------------------------------------------------------------------------


class Door:
    """The route with an application around it, and how much of a body was read."""

    def __init__(self) -> None:
        from fastapi import FastAPI

        self.app, self.read = FastAPI(), 0
        self.app.add_api_route(PATH, endpoint.describe, methods=["GET"])
        self.app.add_api_route(PATH, endpoint.verify, methods=["POST"])
        config = types.SimpleNamespace(max_model_len=64, get_vocab_size=lambda: 100, model="m")
        self.app.state.vericache = endpoint._State(types.SimpleNamespace(model_config=config), TOKEN)

    def ask(self, parts: list[bytes], token: str | None = TOKEN) -> tuple[int, str]:
        """Status and text for a body of these parts."""
        headers = [(b"content-type", b"application/json")]
        if token is not None:
            headers.append((b"authorization", f"Bearer {token}".encode()))
        scope = {"type": "http", "method": "POST", "path": PATH, "query_string": b"", "headers": headers}
        left, sent = list(parts), list[Any]()

        async def receive() -> dict[str, Any]:
            part = left.pop(0)
            self.read += len(part)
            return {"type": "http.request", "body": part, "more_body": bool(left)}

        async def send(message: Any) -> None:
            sent.append(message)

        asyncio.run(self.app(scope, receive, send))
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent).decode()


@pytest.mark.parametrize("token", [None, "", "fifteen letters"])
def test_a_route_that_anybody_could_guess_is_not_offered(token: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERICACHE_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("VERICACHE_TOKEN", token)
    with pytest.raises(ConfigError, match="VERICACHE_TOKEN"):
        asyncio.run(endpoint.VeriCacheEndpoint().init_state(None, None, Namespace()))


def test_nothing_is_read_from_strangers() -> None:
    door = Door()
    for token in (None, "", "another"):
        assert door.ask([b"[" * 1000] * 3, token)[0] == 401
    assert door.read == 0


def test_no_more_is_read_than_a_message_may_have() -> None:
    door, part = Door(), b" " * (MOST_BYTES // 4)
    assert door.ask([part] * 1000)[0] == 413
    assert door.read == 5 * len(part)


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"", 422, "no sense"),
        (b"nothing", 422, "no sense"),
        (b"[" * 100_000, 422, "no sense"),
        (b"\xff", 422, "no sense"),
        (b"[]", 422, "no sense"),
        ({"protocol": PROTOCOL + 1, "other": "fields"}, 400, f"not {PROTOCOL + 1}"),
        ({"checks": []}, 400, "not None"),
        ({"protocol": PROTOCOL, "checks": [{"verified": []}]}, 422, "at least 1"),
        ({"protocol": PROTOCOL, "checks": [{"verified": [5], "drafts": [100]}]}, 400, "outside the vocabulary"),
        ({"protocol": PROTOCOL, "checks": [{"verified": [5] * 64}]}, 400, "no room"),
        ({"protocol": PROTOCOL, "checks": [{"verified": ["5"]}]}, 422, "integer"),
        ({"protocol": PROTOCOL, "checks": [{"verified": [5]}] * 257}, 422, "at most 256"),
        ({"protocol": PROTOCOL, "checks": [{"verified": [5], "more": 1}]}, 422, "Extra"),
    ],
)
def test_a_message_that_makes_no_sense_is_refused(body: Any, status: int, text: str) -> None:
    found = Door().ask([body if isinstance(body, bytes) else json.dumps(body).encode()])
    assert found[0] == status
    assert text in found[1]
