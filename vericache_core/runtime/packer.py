"""Fill one step: rows of several requests, in any phase, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from vericache_core.runtime.request import Want

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Segment(Generic[R]):
    """``count`` leading tokens of ``want`` in rows ``first .. first + count`` of the step."""

    request: R
    want: Want
    first: int
    count: int


def pack(wants: Sequence[tuple[R, Want]], rows: int) -> list[Segment[R]]:
    """Place wants into at most ``rows`` rows.

    Single-row wants (drafts, plain decoding) come first because each lets a request go on, but leave a
    quarter of the step to the others, so that many of them starve nobody; verifies and then prefills fill
    the rest, cut where the step ends, and the first in the order given comes before its kind. A cut want is
    simply asked for again: its first rows are authoritative whether or not the rest came along. A caller
    that rotates the order is fair: every request gets a row before the order has gone round once.
    """
    rank = {"draft": 0, "decode": 0, "verify": 1, "prefill": 2}
    single = [entry for entry in wants if rank[entry[1].phase] == 0]
    blocks = sorted((entry for entry in wants if rank[entry[1].phase]), key=lambda entry: rank[entry[1].phase])
    if blocks and any(entry is wants[0] for entry in blocks):
        blocks = [wants[0], *(entry for entry in blocks if entry is not wants[0])]
    segments: list[Segment[R]] = []
    first = 0
    share = rows - max(1, rows // 4) if blocks else rows
    for request, want in [*single[:share], *blocks, *single[share:]]:
        count = min(len(want.tokens), rows - first)
        if count <= 0:
            break
        segments.append(Segment(request, want, first, count))
        first += count
    return segments
