"""Time as the stores see it, so that tests can move it by hand."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that never go back, and a way to wait for some of them to pass."""

    def now(self) -> float:
        """The time in seconds, comparable with the deadlines of a ``BlobStore``."""

    def wait(self, condition: threading.Condition, until: float | None) -> None:
        """Wait for a notification, at most until that time; ``condition`` is held by the caller. May return early."""


class MonotonicClock:
    """``time.monotonic()``."""

    def now(self) -> float:
        return time.monotonic()

    def wait(self, condition: threading.Condition, until: float | None) -> None:
        condition.wait(None if until is None else min(max(0.0, until - time.monotonic()), threading.TIMEOUT_MAX))
