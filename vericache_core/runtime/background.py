"""Verifies whose swap takes longer than a step: they advance between the layers of the steps of others.

Such a verify has a stack of its own (a greenlet) on the thread that runs the steps. It computes a layer once that layer's full
KV has come in and then gives way until the next one is there, so the device holds a few layers of it and never a whole
cache, the link works while the others draft, and all arithmetic is done by one team of threads: a second team, even an
idle one, makes every parallel region of the first many times as long (ADR 18). One at a time: there is one link.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

from vericache_core.runtime.request import Request
from vericache_core.runtime.segments import Segment
from vericache_core.runtime.tile import StepFault

GiveWay = Callable[["Future[None] | None"], None]
"""Called by a verify before a layer, with the load of its full KV: returns once it has ended. None: there is none."""


@dataclass(slots=True)
class Verdict:
    """What a background verify came to: logits ``[rows, vocab]``, or the fault that ended it; and from when to when it ran."""

    segment: Segment[Request]
    logits: Tensor | None
    fault: StepFault | None
    started: float
    ended: float


class BackgroundVerify:
    """At most one verify in flight; the step loop starts it, lets it advance and collects it.

    Attributes:
        waited_seconds: for which :meth:`collect` stood still for loads.
        homeless: the steps turned out to be run by several threads in turn. A stack cannot leave its thread, so a verify that
            began on another one is forgotten, to be asked for again, and no more should be started.
    """

    def __init__(self) -> None:
        self.waited_seconds, self.homeless = 0.0, False
        self._flight: _Flight | None = None

    @property
    def number(self) -> int | None:
        """Number of the request whose verify is in flight or waits to be collected."""
        return None if self._flight is None else self._flight.segment.request.number

    @property
    def busy(self) -> bool:
        """Whether a verify is in flight or waits to be collected."""
        return self._flight is not None

    def start(self, segment: Segment[Request], run: Callable[[GiveWay], Tensor]) -> None:
        """Begin; ``run`` opens the request's full KV and computes the rows of ``segment``, giving way before each layer."""
        assert self._flight is None
        self._flight = _Flight(segment, run)
        self._flight.start()

    def advance(self) -> None:
        """Compute the layers that have come in; called between the layers of a step."""
        flight = self._flight
        if flight is not None and flight.ready and flight.at_home:
            flight.resume()

    def collect(self, *, block: bool) -> Verdict | None:
        """What came of it, once; None while it runs, unless ``block``, and None where it has to be asked for again."""
        flight = self._flight
        if flight is None:
            return None
        while flight.at_home and not flight.dead and (block or flight.ready):
            began = time.perf_counter()
            wait([flight.awaited])  # may be interrupted; the verify goes on when it is collected the next time
            self.waited_seconds += time.perf_counter() - began
            flight.resume()
        if not flight.dead and flight.at_home:
            return None
        self.abandon()
        if flight.error is not None:
            raise flight.error
        return flight.verdict

    def abandon(self) -> None:
        """End and forget what is in flight: nobody wants the answer any more. Its full KV is closed."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        if not flight.dead:
            if flight.at_home:
                flight.end()
            else:
                self.homeless = True
        flight.segment.request.full.close_step()


class _Flight:
    """One verify on its stack.

    Attributes:
        awaited: the load that it gave way for.
        verdict: what it came to; None while it runs, and if it was ended from outside.
        error: what it raised that is no fault of its request.
    """

    def __init__(self, segment: Segment[Request], run: Callable[[GiveWay], Tensor]) -> None:
        self.segment, self._run = segment, run
        self.awaited: Future[None] = Future()
        self.verdict: Verdict | None = None
        self.error: Exception | None = None
        self._home = threading.get_ident()
        self._stack = greenlet(self._compute)

    @property
    def at_home(self) -> bool:
        """Whether the calling thread is the one that it began on."""
        return threading.get_ident() == self._home

    @property
    def dead(self) -> bool:
        """Whether it runs no more."""
        return self._stack.dead

    @property
    def ready(self) -> bool:
        """Whether it can go on without waiting."""
        return not self.dead and self.awaited.done()

    def start(self) -> None:
        # Inference mode is a state of the thread, saved and restored by whoever enters it. What the verify saves here it
        # restores at its end, which may come on any stack: so that has to be what a thread is in outside of steps.
        with torch.inference_mode(mode=False):
            self._stack.switch()

    def resume(self) -> None:
        with torch.inference_mode():  # and leaves that of the caller as it was
            self._stack.parent = getcurrent()
            self._stack.switch()

    def end(self) -> None:
        with torch.inference_mode():
            self._stack.parent = getcurrent()
            self._stack.throw()

    def _compute(self) -> None:
        started = time.perf_counter()
        logits, fault = None, None
        try:
            logits = self._run(self._give_way)
        except StepFault as found:
            fault = found
        except Exception as error:  # noqa: BLE001  (raised to whoever collects, not into the step of others that it would end)
            self.error = error
            return
        self.verdict = Verdict(self.segment, logits, fault, started, time.perf_counter())

    def _give_way(self, load: Future[None] | None) -> None:
        if load is None or load.done():
            return
        self.awaited = load
        parent = self._stack.parent
        assert parent is not None
        parent.switch()
