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

    Attributes:
        gained: plain tokens, below 0 for losses.
    """

    def __init__(self, memory: float = math.inf) -> None:
        self._memory = memory
        self.gained = self._committed = self._granted = 0.0

    def grant(self, tokens: int) -> None:
        """Count ``tokens`` as good as committed: those that a request will generate; below 0 those that it will not."""
        self._granted += tokens

    def enter(self, committed: int, gained: float, granted: int = 0) -> None:
        """Take in a round that committed so many tokens, ``granted`` of them counted before.

        ``gained`` is in plain tokens, below 0 if the round has lost.
        """
        kept = math.exp(-committed / self._memory)
        self._granted -= granted
        self._committed = self._committed * kept + committed
        self.gained = self.gained * kept + gained

    def credit(self, tolerance: float) -> float:
        """Plain tokens that may be lost from here on: the tolerated fraction, plus gains, less losses."""
        return tolerance * (self._granted + self._committed) + self.gained
