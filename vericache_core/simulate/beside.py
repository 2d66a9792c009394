"""The verify that may run beside the steps of others while its swap comes in, and how much it slows them down."""

from __future__ import annotations

from dataclasses import dataclass

from vericache_core.runtime.costs import CostModel


@dataclass(frozen=True, slots=True)
class Flight:
    """A verify in the background.

    Attributes:
        number: of the request.
        starts: when it began, and ``arrived`` when its last layer has come in, and ``ends`` when that is computed.
        load: share of the device's time that it takes until then.
        rows: that it computes.
    """

    number: int
    starts: float
    arrived: float
    ends: float
    load: float
    rows: int


class Background:
    """Room for one verify, because there is one link.

    Attributes:
        flight: the one under way.
    """

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self.flight: Flight | None = None

    def start(self, now: float, number: int, rows: int, compute: float, link: float) -> None:
        """Begin a verify of ``compute`` seconds of the device and ``link`` seconds of the link.

        Layers are computed as they come in, between the layers of the steps of others, which take as much longer.
        """
        assert self.flight is None
        seconds = self._costs.overlapped(compute, link)
        self.flight = Flight(number, now, now + link, now + seconds, compute / seconds, rows)

    def landed(self, now: float) -> Flight | None:
        """Take out the verify if it is over by ``now``."""
        flight = self.flight
        if flight is None or flight.ends > now:
            return None
        self.flight = None
        return flight

    def slowed(self, now: float, compute: float) -> float:
        """Seconds of a step of ``compute`` seconds while the verify takes its share of the device."""
        if self.flight is None:
            return compute
        left = max(0.0, self.flight.ends - now)
        free = left * (1 - self.flight.load)
        return compute / (1 - self.flight.load) if compute < free else left + compute - free
