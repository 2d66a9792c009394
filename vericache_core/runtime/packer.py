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

    Single-row wants (drafts, plain decoding) come first because each lets a request go on; verifies and
    then prefills fill the rest, cut where the step ends. A cut want is simply asked for again: its first
    rows are authoritative whether or not the rest came along. Within a kind the order given holds, so a
    caller that rotates it is fair.
    """
    rank = {"draft": 0, "decode": 0, "verify": 1, "prefill": 2}
    segments: list[Segment[R]] = []
    first = 0
    for request, want in sorted(wants, key=lambda entry: rank[entry[1].phase]):
        count = min(len(want.tokens), rows - first)
        if count <= 0:
            break
        segments.append(Segment(request, want, first, count))
        first += count
    return segments
