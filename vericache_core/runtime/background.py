"""Verifies whose swap takes longer than a step: they run on a thread of their own while the others draft.

The thread computes a layer as soon as its full KV has come in and then waits for the next one, so the device holds a
few layers of it and never a whole cache, and the link works while the main thread decodes. One at a time: there is
one link.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vericache_core.cache.move import HAVE_NUMBA
from vericache_core.runtime.request import Request
from vericache_core.runtime.segments import Segment
from vericache_core.runtime.tile import StepFault


@dataclass(slots=True)
class Verdict:
    """What a background verify came to: logits ``[rows, vocab]``, or the fault that ended it; and from when to when it ran."""

    segment: Segment[Request]
    logits: Tensor | None
    fault: StepFault | None
    started: float
    ended: float


class BackgroundVerify:
    """At most one verify in flight; the main thread starts it and collects it."""

    def __init__(self) -> None:
        self._worker: ThreadPoolExecutor | None = None
        self._running: tuple[Segment[Request], Future[Tensor]] | None = None
        self._started = self._ended = 0.0

    @property
    def number(self) -> int | None:
        """Number of the request whose verify is in flight or waits to be collected."""
        return None if self._running is None else self._running[0].request.number

    @property
    def busy(self) -> bool:
        """Whether a verify is in flight or waits to be collected."""
        return self._running is not None

    def start(self, segment: Segment[Request], run: Callable[[], Tensor]) -> None:
        """Begin; ``run`` computes the rows of ``segment``."""
        assert self._running is None
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="vericache-verify")
        self._started = time.perf_counter()
        self._running = (segment, self._worker.submit(self._timed, run))

    def collect(self, *, block: bool) -> Verdict | None:
        """What came of it, once; None while it runs, unless ``block``."""
        if self._running is None or not (block or self._running[1].done()):
            return None
        segment, future = self._running
        wait([future])  # may be interrupted; the verify is then still known to whoever lets its request go
        self._running = None
        try:
            logits, fault = future.result(), None
        except StepFault as found:
            logits, fault = None, found
        return Verdict(segment, logits, fault, self._started, self._ended)

    def _timed(self, run: Callable[[], Tensor]) -> Tensor:
        try:
            return run()
        finally:
            self._ended = time.perf_counter()

    def abandon(self) -> None:
        """Wait for what is in flight and forget it, however it ended: nobody wants the answer any more."""
        if self._running is not None:
            wait([self._running[1]])
            self._running = None

    def close(self) -> None:
        """Wait for what is in flight, forget it, and stop the thread."""
        self.abandon()
        if self._worker is not None:
            self._worker.shutdown(wait=True)
            self._worker = None


def is_safe(attention: str, packed: bool) -> bool:
    """Whether two steps may run at the same time: on Numba's workqueue threading layer they cannot.

    Args:
        attention: as chosen.
        packed: whether products are packed, which may be Numba's too.
    """
    if attention != "numba" and not (packed and HAVE_NUMBA):
        return True
    import numba

    try:
        layer: Any = numba.threading_layer()
    except ValueError:  # nothing ran in parallel yet
        return False
    return layer in {"omp", "tbb"}
