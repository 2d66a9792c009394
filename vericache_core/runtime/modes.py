"""Mode choice: where a request's full KV lives and whether it drafts at all, under a budget of device bytes.

``plain`` keeps the full KV on the device and drafts nothing. ``pinned`` keeps the draft KV beside it: drafts read
less, verifies swap nothing, fewer requests fit. ``offloaded`` keeps the draft KV only: most requests fit, and every
verify swaps. Which is best depends on how many requests there are to fill the memory with, so the choice is one of a
mix: so many pinned, the rest offloaded, or all plain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from vericache_core.errors import ConfigError
from vericache_core.runtime.costs import CostModel
from vericache_core.runtime.hazard import accepted_at
from vericache_core.runtime.rounds import MOST, WINDOWS, Situation, round_seconds

Mode = Literal["plain", "pinned", "offloaded"]
MARGIN: Final = 1.02
"""How much faster than plain a mix must look to be taken: costs are estimates, too."""
_TRIED: Final = 24


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request needs; bytes are those at its greatest length.

    Attributes:
        tokens: cached tokens.
        full_bytes: of its full KV.
        draft_bytes: of its draft KV.
        swap_bytes: over the link before each verify, when offloaded.
        transient_bytes: of full KV on the device while one verifies, when offloaded.
        tier: of its full KV, when offloaded.
        hazard: expected, of its drafts.
        new_tokens: that it will generate.
        setup_seconds: of compressing its prefix.
    """

    tokens: int
    full_bytes: float
    draft_bytes: float
    swap_bytes: float
    transient_bytes: float
    tier: str = "host"
    hazard: float = 0.05
    new_tokens: int = 128
    setup_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Mix:
    """Requests that run at a time, by mode, and what they are expected to give.

    Attributes:
        window: of those that draft; 0 with plain ones.
        tokens_per_s: of all together.
    """

    plain: int
    pinned: int
    offloaded: int
    window: int
    tokens_per_s: float

    def mode(self, pinned_now: int) -> Mode:
        """Return the mode for one more request while ``pinned_now`` pinned ones run."""
        if self.plain:
            return "plain"
        return "pinned" if pinned_now < self.pinned else "offloaded"


def best_mix(costs: CostModel, demand: Demand, requests: int, budget: float, *, lockstep: bool = False) -> Mix:
    """Return the fastest mix for ``requests`` requests like ``demand`` under ``budget`` device bytes for KV.

    Raises:
        ConfigError: not one request fits in any mode, or its tier has no known cost.
    """
    plain = _plain(costs, demand, requests, budget)
    if plain is None and demand.draft_bytes + demand.transient_bytes > budget:
        least = min(demand.full_bytes, demand.draft_bytes + demand.transient_bytes)
        raise ConfigError(
            f"a device budget of {budget:.3g} bytes is too small for one request",
            cause=f"a request of {demand.tokens} tokens needs {least:.3g}",
            hint="raise the budget, keep less, or shorten the prompt",
        )
    most = min(requests, int(budget // (demand.full_bytes + demand.draft_bytes)))
    tried = sorted({round(most * i / _TRIED) for i in range(_TRIED + 1)})
    mixes = [mix for pinned in tried if (mix := _mixed(costs, demand, requests, budget, pinned, lockstep)) is not None]
    # Of equal ones the one that leaves the link alone.
    best = max(mixes, key=lambda mix: (mix.tokens_per_s, mix.pinned), default=None)
    if best is None or (plain is not None and best.tokens_per_s < MARGIN * plain.tokens_per_s):
        assert plain is not None
        return plain
    return best


def _plain(costs: CostModel, demand: Demand, requests: int, budget: float) -> Mix | None:
    count = min(requests, int(budget // demand.full_bytes))
    if not count:
        return None
    seconds = round_seconds(costs, Situation(count, demand.tokens, demand.full_bytes, demand.draft_bytes), 0)
    return Mix(count, 0, 0, 0, 1 / seconds)


def _mixed(costs: CostModel, demand: Demand, requests: int, budget: float, pinned: int, lockstep: bool) -> Mix | None:
    left = budget - pinned * (demand.full_bytes + demand.draft_bytes) - demand.transient_bytes
    offloaded = min(requests - pinned, max(0, int(left // demand.draft_bytes)))
    if lockstep:  # all verify at once
        offloaded = min(offloaded, int((left + demand.transient_bytes) // (demand.draft_bytes + demand.transient_bytes)))
    if not pinned + offloaded:
        return None
    situation = Situation(
        pinned + offloaded,
        demand.tokens,
        demand.full_bytes,
        demand.draft_bytes,
        demand.swap_bytes if offloaded else 0.0,
        demand.tier,
        offloaded,
        lockstep,
    )

    def seconds(window: int) -> float:
        """Of one committed token."""
        committed = accepted_at(demand.hazard, window) + 1
        return round_seconds(costs, situation, window) / committed + demand.setup_seconds / demand.new_tokens

    best = min((window for window in WINDOWS if window <= MOST), key=seconds)
    return Mix(0, pinned, offloaded, best, 1 / seconds(best))
