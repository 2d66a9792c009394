"""A circuit breaker: after some failures in a row a store is left alone for a while, then tried with one call."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final, Literal

State = Literal["closed", "open", "half-open"]

CLOSED: Final = "closed"
OPEN: Final = "open"
HALF_OPEN: Final = "half-open"


class CircuitBreaker:
    """Counts failures in a row and says who may call. Safe to use from several threads.

    Closed, everyone may. After ``failures`` in a row it opens, and nobody may for ``rest`` seconds. Then it is half
    open: one call goes through as a probe and its outcome closes or opens it again.

    Args:
        failures: failures in a row that open it.
        rest: seconds that it stays open.
        clock: the time in seconds.
    """

    def __init__(self, failures: int = 3, rest: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._rest, self._clock = failures, rest, clock
        self._lock = threading.Lock()
        self._state: State = CLOSED
        self._in_a_row = 0
        self._until = 0.0
        # Outcomes of calls that were admitted before the last change of state say nothing about the present one.
        self._generation = 0
        self.opened = 0
        """How often it has opened."""

    @property
    def state(self) -> State:
        """The present state; open turns into half-open when a call is admitted, not by time alone."""
        with self._lock:
            return self._state

    @property
    def refuses(self) -> bool:
        """Whether a call that asked now would be turned away; changes nothing."""
        with self._lock:
            return self._state == HALF_OPEN or (self._state == OPEN and self._clock() < self._until)

    def admit(self) -> int | None:
        """A ticket for one call, to be handed in with its outcome, or None when it may not be made."""
        with self._lock:
            if self._state == CLOSED:
                return self._generation
            if self._state == HALF_OPEN or self._clock() < self._until:
                return None
            self._turn(HALF_OPEN)
            return self._generation

    def succeeded(self, ticket: int) -> None:
        """The store answered, whatever it said."""
        with self._lock:
            if ticket != self._generation:
                return
            self._in_a_row = 0
            if self._state != CLOSED:
                self._turn(CLOSED)

    def failed(self, ticket: int) -> None:
        """The store did not answer, or with something that is no answer."""
        with self._lock:
            if ticket != self._generation:
                return
            self._in_a_row += 1
            if self._state == HALF_OPEN or self._in_a_row >= self._limit:
                self._turn(OPEN)
                self._until = self._clock() + self._rest
                self.opened += 1

    def withdrawn(self, ticket: int) -> None:
        """The call was not made after all; a probe leaves its place to the next."""
        with self._lock:
            if ticket == self._generation and self._state == HALF_OPEN:
                self._turn(OPEN)

    def _turn(self, state: State) -> None:
        self._state = state
        self._generation += 1
        self._in_a_row = 0
