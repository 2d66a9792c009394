"""Stopping in order: take nothing new, finish what runs, leave."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from vericache_core.service.http import Service

log = logging.getLogger("vericache.service")
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
POLL: Final = 0.05
"""Seconds between two looks at what is still in flight."""


class Drain:
    """A stop that was asked for, or not yet; made by `draining`.

    Args:
        service: becomes not ready when the drain begins.
        stop: called once then, on a thread of its own; makes the service refuse new work.
        timeout: seconds that work in flight may still take.
    """

    def __init__(self, service: Service | None, stop: Callable[[], None] | None, timeout: float) -> None:
        self._service, self._stop, self.timeout = service, stop, timeout
        self._begun = threading.Event()
        self._once = threading.Lock()
        self._deadline = float("inf")

    @property
    def begun(self) -> bool:
        """Whether the service takes nothing new any more."""
        return self._begun.is_set()

    @property
    def expired(self) -> bool:
        """Whether a drain began so long ago that work in flight is to be given up."""
        return self.begun and time.monotonic() >= self._deadline

    def begin(self) -> None:
        """Refuse new work from now on; what runs goes on. Once is enough."""
        if not self._once.acquire(blocking=False):
            return
        self._deadline = time.monotonic() + self.timeout
        if self._service is not None:
            self._service.state = "draining"
        log.info("draining", extra={"timeout_seconds": self.timeout})
        try:
            if self._stop is not None:
                self._stop()
        finally:
            self._begun.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until a drain begins; False if it did not within ``timeout`` seconds."""
        return self._begun.wait(timeout)

    def finish(self, in_flight: Callable[[], int]) -> bool:
        """Wait until nothing is in flight; False if something still is when the time is up."""
        while (left := in_flight()) > 0:
            if self.expired:
                log.warning("the time to drain is up", extra={"in_flight": left})
                return False
            time.sleep(POLL)
        log.info("drained")
        return True


@contextmanager
def draining(service: Service | None = None, stop: Callable[[], None] | None = None, timeout: float = 30.0) -> Iterator[Drain]:
    """Inside the block the first SIGTERM or SIGINT begins a drain and the second ends the process at once.

    To be entered on the main thread; handlers of before come back at the end.
    """
    drain, signals = Drain(service, stop, timeout), 0

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            os._exit(128 + number)
        # A handler interrupts any line of the main thread, which may hold the very lock that begin() needs.
        threading.Thread(target=drain.begin, name="vericache-drain", daemon=True).start()

    before = {number: signal.signal(number, handle) for number in SIGNALS}
    try:
        yield drain
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
