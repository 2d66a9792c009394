"""Servers for the tests: a Redis that misbehaves on purpose, the real one, and a clock that is moved by hand."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

Command = list[bytes]
Sender = Callable[[socket.socket, bytes], None]


class CutOff(Exception):  # what a fault raises to close the connection
    pass


class FakeRedis:
    """Speaks as much RESP as the store needs. ``fault(command, reply)`` may answer with something else than ``reply``,
    raise `CutOff`, or wait for `released`.

    ``pace`` is how replies are sent.
    """

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.fault: Callable[[Command, bytes], bytes] = lambda _command, reply: reply
        self.pace: Sender = lambda sock, reply: sock.sendall(reply)
        self.released = threading.Event()
        self.commands: list[Command] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._sockets: set[socket.socket] = set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def open_connections(self) -> int:
        return len(self._sockets)

    def close(self) -> None:
        self.released.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in list(self._sockets):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
            assert not thread.is_alive()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._sockets.add(sock)
            thread = threading.Thread(target=self._serve, args=[sock], daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, sock.makefile("rb") as lines, suppress(OSError, CutOff, ValueError):
            while head := lines.readline():
                command = []
                for _ in range(int(head[1:])):
                    size = int(lines.readline()[1:] or -1)
                    command.append(lines.read(size))
                    if lines.read(2) != b"\r\n":
                        raise CutOff
                self.commands.append(command)
                reply = self.fault(command, self._answer(command))
                self.pace(sock, reply)
        self._sockets.discard(sock)

    def _answer(self, command: Command) -> bytes:
        word, *words = command
        match word.upper():
            case b"STRLEN":
                return b":%d\r\n" % len(self.values.get(words[0], b""))
            case b"EXISTS":
                return b":%d\r\n" % (words[0] in self.values)
            case b"UNLINK":
                return b":%d\r\n" % (self.values.pop(words[0], None) is not None)
            case b"GETRANGE":
                piece = self.values.get(words[0], b"")[int(words[1]) : int(words[2]) + 1]
                return b"$%d\r\n%b\r\n" % (len(piece), piece)
            case b"SET":
                self.values[words[0]] = words[1]
                return b"+OK\r\n"
            case b"EXEC":
                return b"*0\r\n"
            case _:
                return b"+OK\r\n"


class RealRedis:
    """The real server in a folder of its own; killed and started again on the same port."""

    def __init__(self, folder: Path, *options: str, tls: bool = False) -> None:
        self.folder, self._options = folder, options
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        if tls:
            self._options = (*options, "--tls-port", str(self.port))
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        program = shutil.which("redis-server")
        if program is None:
            pytest.skip("redis-server is not installed")
        base = [program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self.folder)]
        self._process = subprocess.Popen([*base, *self._options], stdout=subprocess.DEVNULL)
        for _ in range(500):
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return
            time.sleep(0.01)
        raise AssertionError("redis-server did not start")

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class FakeClock:
    """Time that stands still until ``advance``."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._lock = threading.Lock()
        self._conditions: set[threading.Condition] = set()

    def now(self) -> float:
        with self._lock:
            return self._now

    def wait(self, condition: threading.Condition, until: float | None) -> None:
        with self._lock:
            self._conditions.add(condition)
            if until is not None and until <= self._now:
                return
        condition.wait()

    def advance(self, seconds: float) -> None:
        with self._lock:
            self._now += seconds
            conditions = list(self._conditions)
        for condition in conditions:
            with condition:
                condition.notify_all()


def eventually(true: Callable[..., bool]) -> None:
    """Wait for what other threads are about to do."""
    for _ in range(2000):
        if true():
            return
        time.sleep(0.005)
    raise AssertionError("it did not happen")
