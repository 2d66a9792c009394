"""What a round of drafts and a verify costs one request: its share of the steps that it takes part in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from vericache_core.runtime.costs import CostModel

MOST: Final = 64
"""Longest window."""
WINDOWS: Final = (*range(17), *range(18, 33, 2), *range(36, MOST + 1, 4))
"""Windows worth telling apart; 0 is plain decoding."""


@dataclass(frozen=True, slots=True)
class Situation:
    """A request among the others.

    Attributes:
        requests: requests that share each step, this one included.
        tokens: tokens in its cache.
        full_bytes: bytes of its full KV, which a verify or a plain token reads on the device.
        draft_bytes: bytes of its draft KV, which each draft reads.
        swap_bytes: bytes that come over the link before each verify, or before each plain token; 0 for pinned KV.
        tier: where they come from.
        swapping: requests that share the link, this one included.
        lockstep: all draft, then all verify, so that a swap hides behind verifying only.
    """

    requests: int
    tokens: int
    full_bytes: float
    draft_bytes: float
    swap_bytes: float = 0.0
    tier: str = "host"
    swapping: int = 1
    lockstep: bool = False


class RoundPricer:
    """Prices of rounds by window, remembered for situations that are alike (within 2 %).

    Prices are in seconds per request that shares the step: ``requests`` rounds side by side take that many times as
    long. The others are taken to be like this one, their verifies spread evenly over the steps.
    """

    def __init__(self, costs: CostModel) -> None:
        self.costs = costs
        self._known: dict[tuple[object, ...], tuple[float, ...]] = {}

    def prices(self, situation: Situation) -> tuple[float, ...]:
        """Seconds of a round of 0 .. ``MOST`` drafts; entry 0 is one plain token.

        Raises:
            ConfigError: the tier has no known cost.
        """
        key = (
            situation.requests,
            *map(_step, (situation.tokens, situation.full_bytes, situation.draft_bytes, situation.swap_bytes)),
            situation.tier,
            situation.swapping,
            situation.lockstep,
        )
        if key not in self._known:
            if len(self._known) > 10_000:
                self._known.clear()
            self._known[key] = tuple(round_seconds(self.costs, situation, window) for window in range(MOST + 1))
        return self._known[key]


def round_seconds(costs: CostModel, situation: Situation, window: int) -> float:
    """Seconds of one round, as :meth:`RoundPricer.prices` gives them."""
    requests, rows = situation.requests, window + 1
    load = situation.full_bytes * costs.read + (situation.tokens * rows * costs.pair if window else 0.0)
    link = costs.swap_seconds(situation.tier, situation.swap_bytes) if situation.swap_bytes else 0.0
    link *= max(1, situation.swapping) / requests
    drafting = window * situation.draft_bytes * costs.read
    if situation.lockstep:
        drafting += window * costs.rows_seconds(requests) / requests
        return drafting + costs.overlapped(load + costs.rows_seconds(requests * rows) / requests, link)
    if requests <= rows:
        # Some steps carry one verify beside the drafts of the others, the rest carry drafts alone.
        steps = (rows - requests) * costs.rows_seconds(requests) + requests * costs.rows_seconds(requests + window)
    else:
        # Every step carries several verifies.
        steps = rows * costs.rows_seconds(math.ceil(requests * (window + rows) / rows))
    return max(drafting + load + steps / requests, link)


def _step(value: float) -> int:
    return round(math.log(value) * 50) if value >= 1 else -1
