"""How fast swaps have come in lately: what the loop and the prices of rounds believe of a link.

A calibration says what a link could do on an idle machine; others may share it, or someone may slow it down.
"""

from __future__ import annotations

from typing import Final

_FORGET: Final = 0.7


class LinkMeter:
    """Seconds a byte, per tier: swaps count by their bytes, each swap seven tenths of the one after it."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, float]] = {}

    def observe(self, tier: str, nbytes: float, seconds: float) -> None:
        """A swap of ``nbytes`` kept the link busy for ``seconds``."""
        if nbytes > 0 and seconds > 0:
            before = self._seen.get(tier, (0.0, 0.0))
            self._seen[tier] = _FORGET * before[0] + nbytes, _FORGET * before[1] + seconds

    @property
    def rates(self) -> dict[str, float]:
        """Seconds a byte of the tiers that swaps came from."""
        return {tier: seconds / nbytes for tier, (nbytes, seconds) in self._seen.items()}

    def seconds_per_byte(self, tier: str) -> float | None:
        """None before the first swap."""
        return self.rates.get(tier)
