"""What goes wrong with a store or the link costs speed, never tokens, and never hangs past the deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import Self

from tests.remote.stores import TOKEN, drafter, plain, prompts, same, store_engine, token_file
from vericache_core.errors import RemoteError
from vericache_core.remote.auth import Guard
from vericache_core.remote.frames import Message, decode
from vericache_core.remote.server import StoreServer
from vericache_core.runtime.sampling_params import SamplingParams
from vericache_core.service.access import read_tokens

PARAMS = SamplingParams(max_new_tokens=24)
TIMEOUT = 1.5


class FaultyStore(StoreServer):
    """Changes what it says: ``tamper(method, number of the answer, bytes) -> bytes``; parts of a prefix count as ``prefix``."""

    def __init__(self, folder: Path, tamper: Callable[[str, int, bytes], bytes]) -> None:
        self.tamper = tamper
        self.counts: dict[str, int] = {}
        self.release = threading.Event()
        super().__init__(store_engine(), "127.0.0.1:0", Guard(read_tokens(token_file(folder))))
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release.set()
        self.stop()

    def _changed(self, method: str, data: bytes) -> bytes:
        self.counts[method] = self.counts.get(method, 0) + 1
        return self.tamper(method, self.counts[method], data)

    def _answering(self, method: Any) -> Any:
        inner = super()._answering(method)
        return lambda data, context: self._changed(method.__name__.strip("_"), inner(data, context))

    def _streaming(self, method: Any) -> Any:
        inner = super()._streaming(method)

        def answer(data: bytes, context: Any) -> Iterator[bytes]:
            for said in inner(data, context):
                part = decode(said).kind in {"part", "end"}
                yield self._changed("prefix" if part else method.__name__.strip("_"), said)

        return answer


def edited(data: bytes, payload: bytes | None = None, **fields: Any) -> bytes:
    """The same message with other fields, and a digest that fits."""
    message = decode(data)
    return Message(message.kind, {**message.fields, **fields}, message.payload if payload is None else payload).encode()


def flipped(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at % len(data)] ^= 1 << (at % 8)
    return bytes(changed)


def in_verify(number: int, change: Callable[[bytes], bytes]) -> Callable[[str, int, bytes], bytes]:
    return lambda method, count, data: change(data) if method == "verify" and count >= number else data


def in_part(number: int, change: Callable[[bytes], bytes]) -> Callable[[str, int, bytes], bytes]:
    return lambda method, count, data: change(data) if method == "prefix" and count == number else data


def repeated() -> Callable[[str, int, bytes], bytes]:
    """From the third verify on, the second one's answer."""
    kept: list[bytes] = []

    def tamper(method: str, count: int, data: bytes) -> bytes:
        if method != "verify":
            return data
        if count == 2:
            kept.append(data)
        return kept[0] if count > 2 else data

    return tamper


def other_tokens(data: bytes) -> bytes:
    tokens = decode(data).fields["tokens"]
    return edited(data, tokens=[*tokens[:-1], (tokens[-1] + 1) % 512])


FAULTS: dict[str, Callable[[str, int, bytes], bytes]] = {
    "verdict of another session": in_verify(2, lambda data: edited(data, session="0" * 32)),
    "verdict with another number": in_verify(2, lambda data: edited(data, seq=99)),
    "verdict for another base": in_verify(2, lambda data: edited(data, base=0)),
    "verdict of other tokens": in_verify(2, other_tokens),
    "verdict of no tokens": in_verify(2, lambda data: edited(data, tokens=[])),
    "verdict of too many tokens": in_verify(2, lambda data: edited(data, tokens=[1] * 40)),
    "verdict outside of the vocabulary": in_verify(2, lambda data: edited(data, tokens=[10**9])),
    "verdict of words": in_verify(2, lambda data: edited(data, tokens="seven")),
    "verdict without a digest": in_verify(2, lambda data: edited(data, digest=None)),
    "verdict that ends early": in_verify(2, lambda data: edited(data, finish="stop")),
    "verdict that is noise": in_verify(2, lambda data: b"\x00" * 40),
    "verdict that is empty": in_verify(2, lambda data: b""),
    "verdict cut": in_verify(2, lambda data: data[:-3]),
    "verdict with a flipped bit": in_verify(2, lambda data: flipped(data, 60)),
    "the same verdict again and again": repeated(),
    "part with a flipped bit": in_part(2, lambda data: flipped(data, len(data) // 2)),
    "part cut": in_part(2, lambda data: data[: len(data) // 2]),
    "part of another layer": in_part(2, lambda data: edited(data, layer=2)),
    "part from elsewhere": in_part(2, lambda data: edited(data, offset=7)),
    "part that claims an exabyte": in_part(2, lambda data: edited(data, size=1 << 60)),
    "part that holds noise": in_part(2, lambda data: edited(data, payload=b"\x01" * len(decode(data).payload))),
    "stream that ends early": in_part(2, lambda data: Message("end", {}).encode()),
}


def row_of(fault: str) -> str:
    """Of the fault table."""
    about = {
        "again and again": "doubled",
        "of another": "other",
        "for another": "other",
        "from elsewhere": "other",
        "with another": "other",
        "of other": "other",
        "flipped": "flip",
        "cut": "truncated",
        "exabyte": "length",
        "too many": "length",
        "ends early": "closed",
    }
    return next((row for words, row in about.items() if words in fault), "nonsense")


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=pytest.mark.fault(row_of(name), "verdicts and parts of a prefix")) for name in FAULTS]
)
def test_a_store_that_says_something_else_is_given_up(tmp_path: Path, fault: str) -> None:
    with FaultyStore(tmp_path, FAULTS[fault]) as server:
        with drafter(tmp_path, server.port, compressor="random", keep=0.5, remote_timeout=TIMEOUT) as engine:
            got = engine.generate(prompts(2), PARAMS)
        same(got, plain(prompts(2), PARAMS))
        assert any(output.metrics.degraded for output in got), "the fault was not noticed"


@pytest.mark.fault("hang", "the verifier, at any call")
@pytest.mark.parametrize("method", ["hello", "open", "prefix", "verify"])
def test_a_store_that_falls_silent_is_given_up_in_time(tmp_path: Path, method: str) -> None:
    def tamper(name: str, count: int, data: bytes) -> bytes:
        if name == method and count >= (2 if method in {"prefix", "verify"} else 1):
            server.release.wait(60)
        return data

    server = FaultyStore(tmp_path, tamper)
    with server:
        expected = plain(prompts(2), PARAMS)
        with drafter(tmp_path, server.port, remote_timeout=TIMEOUT) as engine:
            got = engine.generate(prompts(2), PARAMS)
        same(got, expected)
        if method != "hello":
            assert all(output.metrics.degraded for output in got)


@pytest.mark.fault("verifier", "stopped, by both policies")
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_store_that_stops_in_the_middle(tmp_path: Path, policy: str) -> None:
    stopped = threading.Event()

    def stop() -> None:
        server._server.stop(0)
        stopped.set()

    def tamper(name: str, count: int, data: bytes) -> bytes:
        if name == "verify" and count == 3:
            threading.Thread(target=stop).start()
        return data

    server = FaultyStore(tmp_path, tamper)
    expected = plain(prompts(2), PARAMS)
    with server, drafter(tmp_path, server.port, remote_timeout=TIMEOUT, on_remote_error=policy) as engine:
        got = engine.generate(prompts(2), PARAMS)
        assert stopped.wait(120)
        if policy == "recompute":
            same(got, expected)
            assert any(output.metrics.degraded for output in got)
            return
        assert any(output.error is not None for output in got)
        for mine, theirs in zip(got, expected, strict=True):
            assert mine.error is None or isinstance(mine.error, RemoteError)
            assert mine.token_ids == theirs.token_ids[: len(mine.token_ids)]
            assert mine.finish_reason == ("error" if mine.error else theirs.finish_reason)


@pytest.mark.fault("closed", "a verdict is lost")
def test_a_lost_answer_is_asked_for_again(tmp_path: Path) -> None:
    """The store has decided; the drafter asks the same question and gets the same answer."""
    with FaultyStore(tmp_path, lambda m, count, data: b"" if m == "verify" and count % 3 == 0 else data) as server:
        with drafter(tmp_path, server.port, remote_timeout=20.0) as engine:
            got = engine.generate(prompts(1), PARAMS)
        same(got, plain(prompts(1), PARAMS))
        assert not got[0].metrics.degraded
        assert server.counts["verify"] > got[0].metrics.rounds


@pytest.mark.fault("refused", "a verifier, by both policies")
def test_nobody_listens(tmp_path: Path) -> None:
    with drafter(tmp_path, 1, remote_timeout=TIMEOUT) as engine:  # port 1: refused at once
        same(engine.generate(prompts(2), PARAMS), plain(prompts(2), PARAMS))
    with pytest.raises(RemoteError, match="hello"):
        drafter(tmp_path, 1, remote_timeout=TIMEOUT, on_remote_error="fail")


@pytest.mark.fault("refused", "a verifier that comes back")
def test_a_store_that_comes_back_is_used_again(tmp_path: Path) -> None:
    with FaultyStore(tmp_path, lambda _m, _c, data: data) as first:
        port = first.port
        with drafter(tmp_path, port, remote_timeout=TIMEOUT) as engine:
            assert engine.generate(prompts(1), PARAMS)[0].metrics.mode == "remote"
            first.stop()
            (down,) = engine.generate(prompts(1), PARAMS)
            assert down.metrics.mode == "plain"
            assert down.metrics.degraded
            guard = Guard(read_tokens(token_file(tmp_path, TOKEN)))
            second = StoreServer(store_engine(), f"127.0.0.1:{port}", guard)
            second.start()
            try:
                time.sleep(3)  # the drafter waits before it tries again
                (up,) = engine.generate(prompts(1), PARAMS)
            finally:
                second.stop()
            assert up.metrics.mode == "remote"
            same([down, up], plain(prompts(1), PARAMS) * 2)
