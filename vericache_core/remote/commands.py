"""What other threads ask of the engine's thread: one action after the other, each with a future that always ends."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from vericache_core.errors import RemoteError, VeriCacheError

log = logging.getLogger("vericache.remote")
T = TypeVar("T")


class Commands:
    """A queue of actions. Any thread asks; the engine's thread alone runs them, and says when it will run no more.

    Attributes:
        closing: once it is set, actions are answered by an error and not run any more.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock, self._ended = threading.Lock(), False
        self.closing = threading.Event()

    def call(self, action: Callable[[], T]) -> Future[T]:
        """Have ``action`` run; the future gets what it returns."""
        result: Future[T] = Future()
        self.submit(result, lambda: result.set_result(action()))
        return result

    def submit(self, result: Future[T], action: Callable[[], None]) -> None:
        """Have ``action`` run, which answers ``result`` now or later; what it raises is an answer, too."""
        with self._lock:
            if not self._ended:
                self._queue.put(lambda: self._run(result, action))
                return
        result.set_exception(_closing())

    def run_next(self, timeout: float) -> bool:
        """Run the next action; False if none came within ``timeout`` seconds."""
        try:
            command = self._queue.get(block=timeout > 0, timeout=timeout)
        except queue.Empty:
            return False
        command()
        return True

    def close(self) -> None:
        """Refuse what is asked from now on, and wake the engine's thread."""
        self.closing.set()
        self._queue.put(_nothing)

    def end(self) -> None:
        """On the engine's thread, which leaves: answer all that is left, and whatever may still come."""
        with self._lock:
            self._ended = True
        while self.run_next(0.0):
            pass

    def _run(self, result: Future[T], action: Callable[[], None]) -> None:
        try:
            if self.closing.is_set():
                raise _closing()  # noqa: TRY301
            action()
        except VeriCacheError as error:
            result.set_exception(error)
        except Exception as error:
            log.exception("the store failed")
            result.set_exception(VeriCacheError("the store failed", cause=type(error).__name__))


def _closing() -> RemoteError:
    return RemoteError("the store is closing")


def _nothing() -> None:
    """Wakes whoever waits."""
