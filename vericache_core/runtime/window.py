"""Window controller: how many tokens a request drafts before the next verify, from what its rounds cost and gave.

It maximises expected committed tokens per second of the request's share, window 0 being plain decoding. Two rules
keep it from losing where drafting does not pay:

- ledgers, in plain tokens: drafting may cost all requests of a compressor, and each by itself, no more than a small
  fraction of what they committed; beyond that a request lives on what others have gained, up to a larger fraction,
  until its text turns easy. A window is cut down to what a bad but credible hazard could lose of that. Gains raise
  the limit, so a good compressor reaches long windows within a few rounds;
- while it decodes plainly it tries again with a short window, at intervals that double with each failure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vericache_core.runtime.hazard import Prior, accepted_at
from vericache_core.runtime.ledger import Ledger
from vericache_core.runtime.regimes import RegimeBelief, Regimes
from vericache_core.runtime.rounds import MOST, WINDOWS

DOUBT: Final = 0.01
"""Chance below which a hazard is no longer credible."""
PROBE: Final = 4
"""Window of the first try after plain decoding."""


@dataclass(frozen=True, slots=True)
class WindowPolicy:
    """How careful a controller is.

    Attributes:
        most: longest window, at most ``MOST``.
        tolerance: fraction of the plain speed that all together, and each by itself, may lose to trying.
        own: the same for one request that others have gained it for.
        grant: plain tokens that count as committed from the start, for a request that will generate as many.
        stay: fraction by which another window must be better to be changed to.
        interval: plain tokens before drafting is tried again for the first time.
        longest: the same at most.
    """

    most: int = MOST
    tolerance: float = 0.02
    own: float = 0.1
    grant: int = 128
    stay: float = 0.01
    interval: int = 8
    longest: int = 512


class Experience:
    """What requests of one compressor share: how hard texts have been for it, and what drafting has gained.

    Args:
        prior: belief about their hazard before any has drafted.
        memory: tokens after which an observation counts 1/e.
    """

    def __init__(self, prior: Prior | None = None, memory: float = 5000.0) -> None:
        self.regimes = Regimes(prior, memory)
        self.ledger = Ledger(memory)


class WindowController:
    """One request's windows. Call :meth:`choose` before each round and :meth:`observe` after it.

    Args:
        experience: of its compressor; shared with the other requests.
        horizon: tokens that it may generate at most.
        policy: limits.
    """

    def __init__(self, experience: Experience, horizon: int, policy: WindowPolicy | None = None) -> None:
        self.policy = policy or WindowPolicy()
        self.belief = RegimeBelief(experience.regimes)
        self.window = 0
        self._pool, self._own = experience.ledger, Ledger()
        self._granted = 0
        self._grant(min(horizon, self.policy.grant))
        self._plain = 0
        self._failures = 0
        self._probing = False
        self._windows: list[int] = [window for window in WINDOWS if window <= min(self.policy.most, MOST)]

    @property
    def credit(self) -> float:
        """Plain tokens that may be lost from here on.

        Each by itself may lose no more than all together, as long as nobody has gained: requests that begin at once would
        otherwise all bet the same pool, and the throughput is that of the one that loses most of it and ends last.
        """
        own, pool, tolerance = self._own, self._pool, self.policy.tolerance
        others = max(0.0, pool.gained - own.gained)
        return min(own.credit(self.policy.own), own.credit(tolerance) + others, pool.credit(tolerance))

    def choose(self, prices: Sequence[float]) -> int:
        """Return the window of the next round, 0 for one plain token; ``prices`` are seconds by window, 0 .. ``MOST``."""
        wanted = self._best(prices)
        window = self._afford(wanted, prices, self.belief.credible(DOUBT))
        self._probing = False
        if not window and self._may_probe(prices):
            window = self._afford(min(PROBE, self._windows[-1]), prices, 1.0)
            self._probing = window > 0
        self.window = window
        return window

    def observe(self, drafted: int, accepted: int, prices: Sequence[float], plain: int = 1) -> None:
        """Take in a round: ``drafted`` tokens of which ``accepted`` agreed, or 0 and ``plain`` tokens by the full KV alone.

        Raises:
            ValueError: that cannot be.
        """
        self.belief.observe(drafted, accepted, plain)
        gained = accepted + 1 - prices[drafted] / prices[0] if drafted else 0.0
        committed = accepted + 1 if drafted else plain
        granted = min(committed, self._granted)
        self._granted -= granted
        for ledger in (self._pool, self._own):
            ledger.enter(committed, gained, granted)
        if not drafted:
            self._plain += plain
            return
        self._plain = 0
        if not self._probing:
            self._failures = 0
        elif accepted < drafted:
            self._failures += 1
        else:
            self._failures, self._plain = 0, self.policy.interval  # try again at once

    def close(self) -> None:
        """Give back what was granted for tokens that this request will not generate."""
        self._grant(-self._granted)

    def _grant(self, tokens: int) -> None:
        self._granted += tokens
        for ledger in (self._pool, self._own):
            ledger.grant(tokens)

    def _best(self, prices: Sequence[float]) -> int:
        expected = self.belief.expected_accepted(self._windows[-1])
        rates = {window: (expected[window] + 1) / prices[window] for window in self._windows}
        enough = max(rates.values()) * (1 - self.policy.stay)
        if self.window and rates.get(self.window, 0.0) >= enough:
            return self.window
        # Of windows that are as good the shortest: it bets less, and less is drafted beyond the end of the answer.
        return next(window for window in self._windows if rates[window] >= enough)

    def _afford(self, wanted: int, prices: Sequence[float], hazard: float) -> int:
        """Cut a window down to what may be lost at ``hazard``."""
        for window in reversed(self._windows):
            if window <= wanted and prices[window] / prices[0] - 1 - accepted_at(hazard, window) <= self.credit:
                return window
        return 0

    def _may_probe(self, prices: Sequence[float]) -> bool:
        wait = min(self.policy.interval << min(self._failures, 20), self.policy.longest)
        pays = any((window + 1) * prices[0] > prices[window] * (1 + self.policy.tolerance) for window in self._windows)
        return self._plain >= wait and pays
