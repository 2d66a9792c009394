"""What happened when: the events that a timeline of requests is drawn from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vericache_core.runtime.schedulable import Phase


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time.

    Attributes:
        number: of the request.
        kind: what its rows in a step were for, or ``swap`` for a layer of its full KV that came to the device.
        start, end: seconds on the clock of ``time.perf_counter``; a step's rows share those of the step.
        rows: query rows; 0 for a swap.
        background: a verify that ran beside the steps of others.
        layer: of a swap.
    """

    number: int
    kind: Phase | Literal["swap"]
    start: float
    end: float
    rows: int = 0
    background: bool = False
    layer: int | None = None
