"""Mode choice: where a request's full KV lives and whether it drafts at all, under a budget of device bytes.

``plain`` keeps the full KV on the device and drafts nothing. ``pinned`` keeps the draft KV beside it: drafts read
less, verifies swap nothing, fewer requests fit. ``offloaded`` keeps the draft KV only: most requests fit, and every
verify swaps. Which is best depends on how many requests there are to fill the memory with, so the choice is one of a
mix: so many pinned, the rest offloaded, or all plain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from vericache_core.errors import ConfigError
from vericache_core.runtime.costs import CostModel
from vericache_core.runtime.hazard import accepted_at
from vericache_core.runtime.rounds import WINDOWS, Situation, round_seconds
from vericache_core.sizes import exact_size

Mode = Literal["plain", "pinned", "offloaded"]
MODES: Final[tuple[Mode, ...]] = ("plain", "pinned", "offloaded")
MARGIN: Final = 1.02
"""How much faster than plain a mix must look to be taken: costs are estimates, too."""
SWAP_MARGIN: Final = 1.15
"""The same for a mix that swaps, whose rate is harder to tell (see docs/scheduling.md)."""
LOCKSTEP_MARGIN: Final = 1.4
"""The same in lock step, where requests of short windows wait for those of long ones."""
_TRIED: Final = 12


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
        plain_gain: tokens that a plain one gets in the time of one, by proposals that the full KV is asked about.
        ahead: see :class:`~vericache_core.runtime.rounds.Situation`.
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
    plain_gain: float = 1.0
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class Mix:
    """Requests that run at a time, by mode, and what they are expected to give.

    Attributes:
        window: of those that draft; 0 with plain ones.
        tokens_per_s: of all together, until the last request is done.
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


def best_mix(
    costs: CostModel,
    demand: Demand,
    requests: int,
    budget: float,
    *,
    lockstep: bool = False,
    modes: Sequence[Mode] = MODES,
    windows: Sequence[int] = WINDOWS,
    margin: float = SWAP_MARGIN,
) -> Mix:
    """Return the fastest mix for ``requests`` requests like ``demand`` under ``budget`` device bytes for KV.

    Fewer requests than fit may be faster: each swap needs room, and with room for one at a time all wait for it. All
    requests count to the last: one turn of six and one of two is not the same as four turns of two.
    ``modes`` and ``windows`` narrow the choice; a mix that swaps must look ``margin`` times as fast as one that does
    not. ``lockstep`` says that swaps hide behind the step that verifies, and no other.

    Raises:
        ConfigError: not one request fits in any of the modes, or its tier has no known cost.
    """
    plain = _plain(costs, demand, requests, budget) if "plain" in modes else None
    pinned = min(requests, int(budget // (demand.full_bytes + demand.draft_bytes))) if "pinned" in modes else 0
    best: Mix | None = None
    best_worth = 0.0, 0
    for count in _spread(pinned):
        left = budget - count * (demand.full_bytes + demand.draft_bytes)
        offloaded = min(requests - count, _fitting(demand, left, lockstep)) if "offloaded" in modes else 0
        for more in _spread(offloaded):
            if count + more:
                slots = _slots(demand, more, left)
                for window in windows:
                    mix = _rated(costs, demand, count, more, window, slots, lockstep)
                    rest = requests % (count + more)
                    if rest:
                        last = _rated(costs, demand, min(count, rest), max(0, rest - count), window, slots, lockstep)
                        mix = _to_the_end(mix, requests, rest, last)
                    # Of equal ones the one that leaves the link alone.
                    worth = mix.tokens_per_s / (margin if more else MARGIN), mix.pinned
                    if best is None or worth > best_worth:
                        best, best_worth = mix, worth
    if plain is not None and best_worth[0] < plain.tokens_per_s:
        return plain
    if best is None:
        raise ConfigError(
            f"a device budget of {exact_size(budget)} is too small for one request",
            cause=f"a request of {demand.tokens} tokens needs {exact_size(_least(demand, modes))}",
            hint="raise the budget, keep less, or shorten the prompt",
        )
    return best


def _least(demand: Demand, modes: Sequence[Mode]) -> float:
    needs = {
        "plain": demand.full_bytes,
        "pinned": demand.full_bytes + demand.draft_bytes,
        "offloaded": demand.draft_bytes + demand.transient_bytes,
    }
    return min(needs[mode] for mode in modes)


def _spread(most: int) -> list[int]:
    """Counts up to ``most`` worth telling apart."""
    return sorted({round(most * i / _TRIED) for i in range(_TRIED + 1)})


def _fitting(demand: Demand, room: float, lockstep: bool) -> int:
    """Offloaded requests that fit into ``room`` bytes with a swap; in lock step all swap at once."""
    if lockstep:
        return int(room // (demand.draft_bytes + demand.transient_bytes))
    return max(0, int((room - demand.transient_bytes) // demand.draft_bytes))


def _slots(demand: Demand, offloaded: int, room: float) -> int:
    """Swaps that have room at a time beside the draft KV of ``offloaded`` requests, no more than there are requests."""
    left = room - offloaded * demand.draft_bytes
    return offloaded if left >= offloaded * demand.transient_bytes else max(1, int(left // demand.transient_bytes))


def _plain(costs: CostModel, demand: Demand, requests: int, budget: float) -> Mix | None:
    count = min(requests, int(budget // demand.full_bytes))
    if not count:
        return None

    def rated(count: int) -> Mix:
        seconds = round_seconds(costs, Situation(count, demand.tokens, demand.full_bytes, demand.draft_bytes), 0)
        return Mix(count, 0, 0, 0, demand.plain_gain / seconds)

    rest = requests % count
    return _to_the_end(rated(count), requests, rest, rated(rest)) if rest else rated(count)


def _to_the_end(mix: Mix, requests: int, rest: int, last: Mix) -> Mix:
    """Rate ``requests`` requests that run in turns of one mix, the ``rest`` that remains as ``last``."""
    seconds = (requests - rest) / mix.tokens_per_s + rest / last.tokens_per_s
    return replace(mix, tokens_per_s=requests / seconds)


def _rated(costs: CostModel, demand: Demand, pinned: int, offloaded: int, window: int, slots: int, lockstep: bool) -> Mix:
    """Rate a mix with room for ``slots`` swaps at a time."""
    count = pinned + offloaded
    situation = Situation(
        count,
        demand.tokens,
        demand.full_bytes,
        demand.draft_bytes,
        demand.swap_bytes if offloaded else 0.0,
        demand.tier,
        offloaded,
        lockstep,
        ahead=demand.ahead,
    )
    seconds = round_seconds(costs, situation, window)
    if offloaded and not lockstep:
        step = seconds * count / (window + 1)
        link = costs.swap_seconds(demand.tier, demand.swap_bytes)
        # A swap is on the device for its own steps and that of its verify.
        held = (math.ceil(link / step) + 1) * step
        seconds = max(seconds, offloaded * held / slots / count)
    committed = accepted_at(demand.hazard, window) + 1
    return Mix(0, pinned, offloaded, window, 1 / (seconds / committed + demand.setup_seconds / demand.new_tokens))
