"""Regimes: text is easy for a while and hard for a while, and a request's hazard jumps when it turns.

Measured answers fail in clusters: a handful of disagreements within twenty tokens, then a hundred tokens without one. One
hazard per request is wrong for both. So the hazard is hidden and takes one of a few values; with every token it is drawn
anew with a small chance, otherwise it stays (a hidden Markov chain whose states are hazards). After a failure short
windows are best and after a dozen agreements long ones are again, at once; a text of one hazard is the special
case in which all drawings give the same. What is drawn how often is learnt from all requests of a compressor, and each
request counts its own as well, since some are hard throughout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import mul
from typing import Final

from vericache_core.runtime.hazard import Prior

HAZARDS: Final = (0.001, 0.003, 0.008, 0.02, 0.05, 0.12, 0.3, 0.6, 0.95)
"""Values of the hidden hazard."""
_AGREES: Final = tuple(1 - hazard for hazard in HAZARDS)
TURN: Final = 0.05
"""Chance that it is drawn anew with a token."""
OWN: Final = 32.0
"""Drafted tokens of its own at which a request believes as much in itself as in all others."""


class Regimes:
    """How often each hazard is drawn, for one compressor: learnt from all of its requests.

    Args:
        prior: its mean hazard before anything was seen, and how many drafted tokens that counts as.
        memory: drafted tokens, of all requests, after which an observation counts 1/e.
    """

    def __init__(self, prior: Prior | None = None, memory: float = 5000.0) -> None:
        prior = prior or Prior()
        self._memory = memory
        self._counts = [prior.weight * share for share in _spread(prior.hazard)]

    @property
    def shares(self) -> list[float]:
        """Chance of each of ``HAZARDS`` when one is drawn."""
        return _normal(self._counts)

    @property
    def mean(self) -> float:
        """Expected hazard of a token of which nothing is known."""
        return float(sum(map(mul, self.shares, HAZARDS)))

    def add(self, counts: Sequence[float], tokens: int) -> None:
        """Take in that ``tokens`` drafted tokens were met by each of ``HAZARDS`` so many times, in expectation."""
        self._counts = _faded(self._counts, counts, tokens / self._memory)


class RegimeBelief:
    """Which hazard one request is under now, and what may come.

    Args:
        regimes: of its compressor; what it observes is added there.
        memory: drafted tokens of its own after which an observation counts 1/e.
    """

    def __init__(self, regimes: Regimes, memory: float = 500.0) -> None:
        self._regimes, self._memory = regimes, memory
        self._own = [0.0] * len(HAZARDS)
        self._now = regimes.shares

    @property
    def mean(self) -> float:
        """Expected hazard of the next token."""
        return float(sum(map(mul, self._now, HAZARDS)))

    def observe(self, drafted: int, accepted: int, plain: int = 1) -> None:
        """Take in one round: ``drafted`` tokens of which the first ``accepted`` agreed with the full KV.

        Without drafts ``plain`` tokens have passed that say nothing.

        Raises:
            ValueError: that cannot be.
        """
        if not 0 <= accepted <= drafted:
            raise ValueError(f"{accepted} of {drafted} drafted tokens accepted")
        drawn, seen, met = self._drawn(), 0, [0.0] * len(HAZARDS)
        for agreed in [True] * accepted + [False] * (accepted < drafted):
            now = _normal(map(mul, self._now, _AGREES if agreed else HAZARDS))
            met = [count + chance for count, chance in zip(met, now, strict=True)]
            self._now, seen = _turned(now, drawn), seen + 1
        if accepted == drafted:  # the token that the full KV has added was drafted by nobody
            for _ in range(1 if drafted else plain):
                self._now = _turned(self._now, drawn)
        if seen:
            self._regimes.add(met, seen)
            self._own = _faded(self._own, met, seen / self._memory)

    def expected_accepted(self, most: int) -> list[float]:
        """Accepted tokens to expect of windows 0 .. ``most``."""
        now, total, expected = self._now, 0.0, [0.0]
        turns = [TURN * share for share in self._drawn()]
        for _ in range(most):  # asked before every round of every request, so written for speed
            agreed = list(map(mul, now, _AGREES))
            survive = sum(agreed)
            total += survive
            expected.append(total)
            now = [(1 - TURN) * chance + survive * turn for chance, turn in zip(agreed, turns)]  # noqa: B905
        return expected

    def credible(self, doubt: float) -> float:
        """The hazard that the present one is above with a chance of ``doubt`` at most."""
        above = 0.0
        for chance, hazard in zip(reversed(self._now), reversed(HAZARDS), strict=True):
            above += chance
            if above > doubt:
                return hazard
        return HAZARDS[0]

    def _drawn(self) -> list[float]:
        own = sum(self._own) + OWN
        return [(OWN * share + count) / own for share, count in zip(self._regimes.shares, self._own, strict=True)]


def _turned(now: Sequence[float], drawn: Sequence[float]) -> list[float]:
    """Chances after a token with which the hazard may have been drawn anew."""
    return [(1 - TURN) * chance + TURN * share for chance, share in zip(now, drawn, strict=True)]


def _normal(chances: Iterable[float]) -> list[float]:
    chances = list(chances)
    total = sum(chances)
    return [chance / total for chance in chances]


def _faded(counts: Sequence[float], new: Sequence[float], age: float) -> list[float]:
    return [count * math.exp(-age) + more for count, more in zip(counts, new, strict=True)]


def _spread(mean: float) -> list[float]:
    """Chances of ``HAZARDS`` with this mean, or the nearest that there is: nothing else is known, so they are spread wide."""

    def tilted(power: float) -> list[float]:
        return _normal((1 - hazard) * hazard**power for hazard in HAZARDS)

    low, high = -8.0, 40.0
    for _ in range(40):
        middle = (low + high) / 2
        below = sum(chance * hazard for chance, hazard in zip(tilted(middle), HAZARDS, strict=True)) < mean
        low, high = (middle, high) if below else (low, middle)
    return tilted(low)
