"""Faults below the messages: a wire that is cut, drips, goes dark, or garbles bytes. Tokens stay right."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import Self

from tests.remote.stores import drafter, plain, prompts, same, store
from vericache_core.remote import link
from vericache_core.runtime.sampling_params import SamplingParams

PARAMS = SamplingParams(max_new_tokens=24)


def hang_up(end: socket.socket) -> None:
    """Close, and tell the peer at once: closing alone does not as long as another thread is in ``recv``."""
    with contextlib.suppress(OSError):  # it may have been closed before
        end.shutdown(socket.SHUT_RDWR)
    end.close()


class Wire:
    """A proxy to ``port``; after ``good`` bytes from the store the fault sets in."""

    def __init__(self, port: int, fault: str, good: int) -> None:
        self.port, self.fault, self.good = port, fault, good
        self.carried = 0
        self.ended, self._lock = threading.Event(), threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self.ended.set()
            sockets = list(self._sockets)
        for each in sockets:
            hang_up(each)
        for thread in self._threads:
            thread.join(5)
        assert not [thread for thread in self._threads if thread.is_alive()]

    def _accept(self) -> None:
        while not self.ended.is_set():
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self.port))
            with self._lock:
                self._sockets += [near, far]
                if self.ended.is_set():  # whoever closes them has been here
                    hang_up(near)
                    hang_up(far)
                    return
            for source, target, down in ((near, far, False), (far, near, True)):
                thread = threading.Thread(target=self._carry, args=(source, target, down), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _carry(self, source: socket.socket, target: socket.socket, down: bool) -> None:
        with contextlib.suppress(OSError):  # the other direction may have ended
            while data := source.recv(4096):
                self.carried += len(data) * down
                target.sendall(self._changed(data, target) if down and self.carried > self.good else data)
        for each in (source, target):
            hang_up(each)

    def _changed(self, data: bytes, target: socket.socket) -> bytes:
        if self.fault == "cut":
            raise ConnectionResetError(104, "cut")
        if self.fault == "garbled":
            return bytes(byte ^ 0x55 for byte in data)
        if self.fault == "drips":
            for byte in data:
                if self.ended.wait(1.0):
                    break
                target.sendall(bytes([byte]))
        self.ended.wait(60)  # dark
        return b""


ROWS = {"cut": "closed", "drips": "drip", "dark": "hang", "garbled": "flip"}
SOON = [(fault, good) for fault in ("cut", "garbled") for good in (3000, 50_000)]
LATER = [(fault, good) for fault in ("cut", "drips", "dark", "garbled") for good in (200, 3000, 20_000, 50_000)]


def case(fault: str, good: int, *marks: pytest.MarkDecorator) -> Any:
    return pytest.param(fault, good, marks=[pytest.mark.fault(ROWS[fault], "the wire, after 200 to 50,000 bytes"), *marks])


@pytest.mark.parametrize(
    ("fault", "good"), [*(case(*at) for at in SOON), *(case(*at, pytest.mark.slow) for at in LATER if at not in SOON)]
)
def test_a_bad_wire(tmp_path: Path, fault: str, good: int) -> None:
    expected = plain(prompts(2), PARAMS)
    with store(tmp_path) as server, Wire(server.port, fault, good) as wire:
        with drafter(tmp_path, 1, remote=wire.address, compressor="random", keep=0.5, remote_timeout=1.5) as engine:
            got = engine.generate(prompts(2), PARAMS)
        same(got, expected)
        assert wire.carried > good, "the fault never set in"
        assert good < 1000 or any(output.metrics.degraded for output in got)


@pytest.mark.fault("hang", "accepts and says nothing, while a drafter closes")
def test_a_drafter_that_closes_leaves_no_attempt_to_connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC does not break off an attempt when its channel is closed; it must end by itself soon, not 20 seconds later."""
    monkeypatch.setattr(link, "_LEAST_CONNECT", 1.0)
    expected = plain(prompts(1), PARAMS)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with drafter(tmp_path, 1, remote=address, compressor="random", keep=0.5, remote_timeout=1.0) as engine:
            near, _ = silent.accept()
            same(engine.generate(prompts(1), PARAMS), expected)
        with near:
            near.settimeout(15)  # by itself gRPC takes 20
            while near.recv(4096):
                pass
