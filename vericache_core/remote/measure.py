"""What the link can do, as it is now: latency of a small question, bandwidth of large answers."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from vericache_core.remote.frames import Message
from vericache_core.remote.link import Link

SMALL = 64
LARGE = 1 << 20


@dataclass(frozen=True)
class LinkSpeed:
    """``latency`` in seconds of a round trip, ``bandwidth`` in bytes per second towards the drafter."""

    latency: float
    bandwidth: float


def measure_link(link: Link, repeats: int = 3, enough: float = 0.5) -> LinkSpeed:
    """Ask for little, then for much, until that took ``enough`` seconds, at least ``repeats`` times.

    Large answers come back to back, so that a token bucket along the way has run empty: the first ones do not count.

    Raises:
        RemoteError: the store did not answer.
    """
    small = statistics.median(_seconds(link, SMALL) for _ in range(2 * repeats + 1))
    _seconds(link, LARGE)
    times: list[float] = []
    while len(times) < repeats or sum(times) < enough:
        times.append(_seconds(link, LARGE))
        if len(times) >= 64:
            break
    large = statistics.median(times)
    return LinkSpeed(small, (LARGE - SMALL) / max(large - small, 1e-9))


def _seconds(link: Link, nbytes: int) -> float:
    started = time.perf_counter()
    answer = link.ask("echo", Message("echo", {"bytes": nbytes}), timeout=max(30.0, link.timeout)).expect("echo")
    assert len(answer.payload) == nbytes
    return time.perf_counter() - started
