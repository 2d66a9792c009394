"""What a round of drafts and a verify costs one request: its share of the steps that it takes part in."""

from __future__ import annotations

import math
from collections.abc import Callable
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
        drafts_per_step: tokens that a draft step brings, more than one with a proposer.
        proposed: rows of a draft step beside the first.
        ahead: the whole full KV comes in before its verify begins, and the request drafts meanwhile. Otherwise it streams
            through a few layers' room during the verify.
    """

    requests: int
    tokens: int
    full_bytes: float
    draft_bytes: float
    swap_bytes: float = 0.0
    tier: str = "host"
    swapping: int = 1
    lockstep: bool = False
    drafts_per_step: float = 1.0
    proposed: float = 0.0
    ahead: bool = False


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
        return self._remembered(round_seconds, situation, MOST)

    def speculation_prices(self, situation: Situation, most: int) -> tuple[float, ...]:
        """Seconds of a round of 0 .. ``most`` proposals that the full KV is asked about without drafts.

        Raises:
            ConfigError: the tier has no known cost.
        """
        return self._remembered(speculation_seconds, situation, most)

    def _remembered(
        self, price: Callable[[CostModel, Situation, int], float], situation: Situation, most: int
    ) -> tuple[float, ...]:
        key = (
            price,
            most,
            situation.requests,
            *map(_step, (situation.tokens, situation.full_bytes, situation.draft_bytes, situation.swap_bytes)),
            situation.tier,
            situation.swapping,
            situation.lockstep,
            round(8 * situation.drafts_per_step),
            round(4 * situation.proposed),
            situation.ahead,
        )
        if key not in self._known:
            if len(self._known) > 10_000:
                self._known.clear()
            self._known[key] = tuple(price(self.costs, situation, length) for length in range(most + 1))
        return self._known[key]


def round_seconds(costs: CostModel, situation: Situation, window: int) -> float:
    """Seconds of one round, as :meth:`RoundPricer.prices` gives them."""
    requests, rows = situation.requests, window + 1
    drafts, draft_rows = window / situation.drafts_per_step, 1 + situation.proposed
    load, swap = _authoritative(costs, situation, window)
    link = swap * max(1, situation.swapping) / requests
    kept = situation.tokens * situation.draft_bytes / situation.full_bytes if situation.proposed else 0.0
    drafting = drafts * costs.attention_seconds(situation.draft_bytes, kept * draft_rows)
    together = costs.rows_seconds(math.ceil(requests * draft_rows))
    if situation.lockstep:
        drafting += drafts * together / requests
        return drafting + costs.overlapped(load + costs.rows_seconds(requests * rows) / requests, link)
    if not situation.ahead and drafts and requests > 1 and swap > together:
        # Its verify runs beside the steps of others, as rows of their own, while it drafts nothing. When it is over, the
        # next one begins with the next step: half a step later, on average.
        verify = load + costs.rows_seconds(rows)
        swap += (together + requests * drafting / drafts) / 2
        others = drafts * together + requests * drafting + (requests - 1) * verify
        return max(others + verify, others + swap, swap * max(1, situation.swapping)) / requests
    # Verifies are spread over the steps of a round evenly, but each step carries a whole number of them.
    steps = drafts + 1
    fewer = math.floor(requests / steps)
    more = requests / steps - fewer

    def step(verifies: int) -> float:
        return costs.rows_seconds(math.ceil((requests - verifies) * draft_rows) + verifies * rows)

    seconds = steps * ((1 - more) * step(fewer) + (more * step(fewer + 1) if more else 0.0))
    seconds = max(drafting + load + seconds / requests, link)
    if situation.ahead:
        return seconds
    # Others compute while it streams in, but the request itself waits: no round is shorter than its own drafts and swap.
    return max(seconds, drafting + (drafts * together + swap) / requests)


def speculation_seconds(costs: CostModel, situation: Situation, proposals: int) -> float:
    """Seconds of one round of :meth:`RoundPricer.speculation_prices`; without proposals it is one plain token."""
    requests = situation.requests
    load, swap = _authoritative(costs, situation, proposals)
    link = swap * max(1, situation.swapping) / requests
    compute = load + costs.rows_seconds(requests * (1 + proposals)) / requests
    return costs.overlapped(compute, link) if situation.lockstep else max(compute, link)


def _authoritative(costs: CostModel, situation: Situation, further: int) -> tuple[float, float]:
    """Seconds to attend with one row and ``further`` ones to the full KV, and of its swap."""
    load = costs.attention_seconds(situation.full_bytes, situation.tokens * (1 + further) if further else 0.0)
    return load, costs.swap_seconds(situation.tier, situation.swap_bytes) if situation.swap_bytes else 0.0


def _step(value: float) -> int:
    return round(math.log(value) * 50) if value >= 1 else -1
