"""Child processes with an address: started, waited for, and ended with their own children."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from vericache_core.errors import RemoteError

if TYPE_CHECKING:
    from typing_extensions import Self


LONGEST_ROUND = 15.0
"""Most seconds that one look at a child counts for: longer ones mean that the machine paused, the child too."""


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def accepts(port: int) -> bool:
    """Whether somebody takes connections on a port of the loopback interface."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Service:
    """A child process that serves something.

    Args:
        command: program and arguments.
        ready: asked until it says True.
        log: file for what it prints.
        environment: further variables.
        seconds: how long it may take to be ready; one that ends is noticed at once.

    Raises:
        RemoteError: it ended, or was not ready in time; the message carries the end of its log.
    """

    def __init__(
        self,
        command: Sequence[str],
        ready: Callable[[], bool],
        log: Path,
        environment: Mapping[str, str] | None = None,
        seconds: float = 120.0,
    ) -> None:
        self.command, self.log = list(command), log
        with log.open("ab") as output:
            # A session of its own: workers that it starts end with it.
            self._process = subprocess.Popen(  # noqa: S603 (the caller's command)
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        try:
            self._wait(ready, seconds)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def close(self, grace: float = 10.0) -> None:
        """Ask it to end, and make it end after ``grace`` seconds; safe to call twice."""
        if self._process.poll() is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace)
        self._signal(signal.SIGKILL)  # what is left of its session
        self._process.wait()

    def _wait(self, ready: Callable[[], bool], seconds: float) -> None:
        waited, before = 0.0, time.monotonic()
        while True:
            # Asked first: whoever answers on the port of a child that ended is somebody else.
            if self._process.poll() is not None:
                raise RemoteError(f"{self.command[0]} ended with status {self._process.returncode}", cause=self._last_words())
            if ready():
                return
            if waited > seconds:
                raise RemoteError(f"{self.command[0]} was not ready after {seconds:g} s", cause=self._last_words())
            time.sleep(0.2)
            now = time.monotonic()
            waited, before = waited + min(now - before, LONGEST_ROUND), now

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _last_words(self) -> str:
        return " ".join(self.log.read_text(errors="replace").split()[-60:])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
