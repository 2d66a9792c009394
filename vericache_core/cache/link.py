"""The way from a slower tier to the device, and the most bytes a second that may use it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from vericache_core.errors import SwapError

STOPPED = "the load was stopped: nobody waits for it any more"


class Link:
    """Holds transfers back to a rate that all of them share.

    A transfer takes the link for ``bytes / rate`` seconds, from when it starts or when the link is free, whichever is
    later. What the transfer itself takes counts into that, so a link that is slower than its limit is not slowed down
    further.

    Args:
        bytes_per_s: the rate; None for as fast as it goes.
        clock: seconds that only grow.
        sleep: waits for seconds, or until the event is set.
    """

    def __init__(
        self,
        bytes_per_s: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[threading.Event, float], object] = threading.Event.wait,
    ) -> None:
        self.bytes_per_s, self._clock, self._sleep = bytes_per_s, clock, sleep
        self._free_at = float("-inf")
        self._lock = threading.Lock()

    def now(self) -> float:
        """The clock, to be read when a transfer starts."""
        return self._clock()

    def hold(self, started: float, nbytes: int, stop: threading.Event) -> None:
        """Wait until ``nbytes`` whose transfer began at ``started`` and is done may have arrived.

        Raises:
            SwapError: ``stop`` was set meanwhile; the rest of the time is given back to others.
        """
        if self.bytes_per_s is None:
            return
        with self._lock:
            self._free_at = max(self._free_at, started) + nbytes / self.bytes_per_s
            due = self._free_at
        rest = due - self._clock()
        if rest > 0:
            self._sleep(stop, rest)
            if stop.is_set():
                with self._lock:
                    self._free_at -= max(0.0, due - self._clock())
                raise SwapError(STOPPED)
