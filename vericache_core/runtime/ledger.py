"""What drafting may cost: a ledger in plain tokens, of one request and of all that share a compressor.

A round that took as long as three plain tokens and committed two has lost one. Losses are bets on gains to come, and the
sum of the bets is bounded: by a small fraction of what was committed, plus what drafting has gained.
"""

from __future__ import annotations

import math


class Ledger:
    """Gains and losses.

    Args:
        memory: committed tokens after which an entry counts 1/e, so that old gains do not pay for new losses for ever.
    """

    def __init__(self, memory: float = math.inf) -> None:
        self._memory = memory
        self.gained = 0.0
        self._granted = self._committed = 0.0

    def open(self, grant: int) -> None:
        """Count ``grant`` tokens as good as committed: those of a request that will generate as many."""
        self._granted += grant

    def enter(self, committed: int, gained: float) -> None:
        """Take in a round that committed so many tokens and gained so many plain ones, lost them if below 0."""
        kept = math.exp(-committed / self._memory)
        self._granted *= kept
        self._committed = self._committed * kept + committed
        self.gained = self.gained * kept + gained

    def credit(self, tolerance: float) -> float:
        """Plain tokens that may be lost from here on: the tolerated fraction, plus gains, less losses."""
        return tolerance * max(self._granted, self._committed) + self.gained
