"""Reservation rings over the steps to come: link time, transient device bytes, and verifies.

A verify at step ``d`` needs its full KV on the device by then. The swap takes link time of the steps before ``d``,
and its bytes are held from the first of them to the end of ``d``. Trying the wanted step, then one earlier, one
later, and so on spreads the verifies, so that the link is busy all the time and few caches are on the device at once.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

HORIZON = 128
"""Steps ahead that are planned, unless a single swap takes more."""


@dataclass(slots=True)
class Reservation:
    """A verify to come.

    Attributes:
        verify: step of the verify.
        start: step at which its swap starts; ``verify`` itself when nothing is swapped.
        nbytes: held on the device from ``start`` to ``verify``.
    """

    verify: int
    start: int
    nbytes: float
    link: dict[int, float]


class Rings:
    """Steps are numbered from 0; ``now`` is the next one to run."""

    def __init__(self) -> None:
        self.now = 0
        self._link: dict[int, float] = defaultdict(float)
        self._bytes: dict[int, float] = defaultdict(float)
        self._verifies: dict[int, int] = defaultdict(int)
        self._reserved: dict[int, Reservation] = {}

    def get(self, number: int) -> Reservation | None:
        """Return the reservation of a request."""
        return self._reserved.get(number)

    def reserve(
        self, number: int, anchor: int, seconds: float, nbytes: float, *, step: float, room: float, verifies: int
    ) -> bool:
        """Reserve a verify as near to ``anchor`` steps from now as the rings allow.

        Args:
            number: of the request.
            anchor: steps from now at which it would verify if it were alone.
            seconds: link time of its swap.
            nbytes: device bytes of its swap.
            step: seconds a step takes, about.
            room: device bytes for all swaps together.
            verifies: most of them in one step.

        Returns:
            Whether there was a place; False leaves the rings as they are.
        """
        self.cancel(number)
        shortest = max(1, -(-seconds // step)) if seconds else 0
        soonest, latest = int(shortest), max(HORIZON, int(2 * shortest))
        middle = min(max(anchor, soonest), latest)
        for away in range(latest + 1):
            for ahead in (middle - away, middle + away) if away else (middle,):
                if not soonest <= ahead <= latest:
                    continue
                found = self._place(ahead, seconds, nbytes, step, room)
                if found is None or self._verifies[found.verify] >= verifies:
                    continue
                self._enter(found, 1)
                self._reserved[number] = found
                return True
        return False

    def cancel(self, number: int) -> None:
        """Give a reservation back, if there is one."""
        found = self._reserved.pop(number, None)
        if found is not None:
            self._enter(found, -1)

    def postpone(self, number: int) -> None:
        """Hold the bytes of a verify that was due for one step more."""
        found = self._reserved[number]
        self._enter(found, -1)
        found.verify = self.now + 1
        self._enter(found, 1)

    def advance(self) -> None:
        """Go one step on."""
        for ring in (self._link, self._bytes, self._verifies):
            ring.pop(self.now, None)
        self.now += 1

    def _place(self, ahead: int, seconds: float, nbytes: float, step: float, room: float) -> Reservation | None:
        verify, left, link, at = self.now + ahead, seconds, {}, self.now + ahead
        while left > 1e-9 * step:
            at -= 1
            free = step - self._link[at]
            if at < self.now or free <= 1e-9 * step:
                return None  # a swap does not wait for another one in between: it would hold its bytes meanwhile
            link[at] = min(left, free)
            left -= link[at]
        start = min(link, default=verify)
        if any(self._bytes[at] + nbytes > room for at in range(start, verify + 1)) and nbytes:
            return None
        return Reservation(verify, start, nbytes, link)

    def _enter(self, found: Reservation, sign: int) -> None:
        for at, seconds in found.link.items():
            if at >= self.now:
                self._link[at] += sign * seconds
        for at in range(max(found.start, self.now), found.verify + 1):
            self._bytes[at] += sign * found.nbytes
        if found.verify >= self.now:
            self._verifies[found.verify] += sign

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless the rings hold what is reserved and nothing else."""
        link: dict[int, float] = defaultdict(float)
        held: dict[int, float] = defaultdict(float)
        for found in self._reserved.values():
            assert found.start <= found.verify
            assert found.verify >= self.now, "a verify that was missed was not postponed"
            for at, seconds in found.link.items():
                link[at] += seconds
            for at in range(found.start, found.verify + 1):
                held[at] += found.nbytes
        for ring, wanted in ((self._link, link), (self._bytes, held)):
            for at in {*ring, *wanted}:
                if at >= self.now:
                    assert abs(ring[at] - wanted[at]) <= 1e-6 * max(1.0, abs(wanted[at])), (at, ring[at], wanted[at])
