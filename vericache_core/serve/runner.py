"""One thread that runs an engine for many callers: what they ask goes in, pieces of text come out.

An engine serves one thread at a time and a step takes long, so callers leave what they want in a queue, and the thread
takes it up between two steps.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vericache_core.errors import VeriCacheError
from vericache_core.runtime.output import TokenLogprobs
from vericache_core.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vericache_core.engine import Engine
    from vericache_core.outputs import Job, RequestOutput

log = logging.getLogger("vericache.serve")


@dataclass(frozen=True)
class Piece:
    """News of a request: the first says that it was taken in, the last has its whole output or why there is none."""

    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    output: RequestOutput | None = None
    error: VeriCacheError | None = None

    @property
    def last(self) -> bool:
        return self.output is not None or self.error is not None


Deliver = Callable[[Piece], None]
"""Called on the runner's thread; must return soon and raise nothing."""


@dataclass(frozen=True)
class _Running:
    job: Job
    deliver: Deliver


class Runner:
    """Runs ``engine`` from :meth:`start` to :meth:`close`; every method may be called from any thread.

    Args:
        engine: nobody else may step it meanwhile.
        died: called when the thread ends by a bug; every caller has had an error by then.

    Attributes:
        failed: whether the thread ended by a bug.
    """

    def __init__(self, engine: Engine, died: Callable[[], None] = lambda: None) -> None:
        self._engine, self._died, self.failed = engine, died, False
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._waiting: dict[int, Deliver] = {}  # asked for, and not at its last piece
        self._running: dict[int, _Running] = {}  # of these, what the engine has; the thread's own
        self._lock = threading.Lock()  # guards _waiting and _closed
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="vericache-engine", daemon=True)

    @property
    def in_flight(self) -> int:
        """Requests that somebody waits for."""
        with self._lock:
            return len(self._waiting)

    def start(self) -> None:
        """Run from now on."""
        self._thread.start()

    def submit(
        self,
        prompt: Any,
        params: SamplingParams,
        deliver: Deliver,
        *,
        plain: bool = False,
        priority: int = 0,
        tenant: str = "",
    ) -> int:
        """Ask for an answer, whose pieces ``deliver`` gets; returns a number for :meth:`cancel`.

        Raises:
            VeriCacheError: the runner has ended.
        """
        number = next(self._numbers)
        with self._lock:
            if self._closed:
                raise VeriCacheError("the engine has stopped")
            self._waiting[number] = deliver
            chosen = {"compressor": None} if plain else {}
            further = {**chosen, "priority": priority, "tenant": tenant}
            self._inbox.put(lambda: self._begin(number, deliver, prompt, params, further))
        return number

    def cancel(self, number: int) -> None:
        """End a request, whose last piece comes soon; does nothing when it came already."""
        self._inbox.put(lambda: self._cancel(number))

    def close(self) -> None:
        """Cancel what runs and end the thread."""
        with self._lock:
            self._closed = True
        self._inbox.put(lambda: None)  # wakes the thread
        self._thread.join()

    # -- on the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closed:
                self._take_up()
                if self._running:
                    self._engine.step()
                    self._hand_out()
            for number in list(self._running):
                self._cancel(number)
            self._end_all(VeriCacheError("the server has stopped"))
        except Exception as error:
            log.exception("the engine's thread has died")
            self.failed = True
            self._end_all(VeriCacheError("the engine has died", cause=f"{type(error).__name__}: {error}"))
            self._died()

    def _take_up(self) -> None:
        """Do what was asked for since the last step; without anything to run, wait for it."""
        if not self._running:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _begin(self, number: int, deliver: Deliver, prompt: Any, params: SamplingParams, further: dict[str, Any]) -> None:
        try:
            job = self._engine.submit(prompt, params, **further)
        except VeriCacheError as error:
            self._end(number, Piece(error=error))
        except Exception as error:  # a bug that one prompt shows must not end the answers of others
            log.exception("a request could not begin")
            self._end(number, Piece(error=VeriCacheError("internal error", cause=f"{type(error).__name__}: {error}")))
        else:
            self._running[number] = _Running(job, deliver)
            deliver(Piece())

    def _cancel(self, number: int) -> None:
        running = self._running.get(number)
        if running is not None:
            running.job.cancel()
            self._hand_out_one(number, running)

    def _hand_out(self) -> None:
        for number, running in list(self._running.items()):
            self._hand_out_one(number, running)

    def _hand_out_one(self, number: int, running: _Running) -> None:
        text, logprobs = running.job.take_text(), running.job.take_logprobs()
        if running.job.finished:
            del self._running[number]
            self._end(number, Piece(text, logprobs, running.job.result()))
        elif text or logprobs:
            running.deliver(Piece(text, logprobs))

    def _end(self, number: int, piece: Piece) -> None:
        with self._lock:
            deliver = self._waiting.pop(number, None)
        if deliver is not None:
            deliver(piece)

    def _end_all(self, error: VeriCacheError) -> None:
        with self._lock:
            self._closed = True
            numbers = list(self._waiting)
        for number in numbers:
            self._end(number, Piece(error=error))
