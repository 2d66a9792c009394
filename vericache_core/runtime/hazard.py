"""Hazard: the chance that a drafted token differs from what the full KV says, given that all before it agreed.

One number says how good a compressor is for a request: with a constant hazard ``h`` a window of ``x`` drafts has
``sum((1 - h) ** i for i in 1..x)`` accepted tokens on average, which fits published acceptance curves of compressed
KV to half a token. A round is a censored geometric sample: its accepted tokens are successes, and only a round
that ended in a disagreement holds a failure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Prior:
    """What is believed before a request has drafted anything: a Beta distribution.

    Attributes:
        hazard: its mean, between 0 and 1 and neither of them.
        weight: drafted tokens that it counts as.

    Raises:
        ValueError: a value is out of range.
    """

    hazard: float = 0.05
    weight: float = 8.0

    def __post_init__(self) -> None:
        if not 0 < self.hazard < 1:
            raise ValueError(f"hazard: expected a number between 0 and 1, got {self.hazard!r}")
        if not 0 < self.weight < math.inf:
            raise ValueError(f"weight: expected a positive number, got {self.weight!r}")


BEYOND_CHANCE: Final = 3.5
"""Deviations between the short and the long memory that mean a change of the text."""


LEAST: Final = Prior(0.05, 1.0)
"""What is left of a prior that was forgotten."""


class HazardEstimate:
    """Belief about one request's hazard; newer rounds count more, so that it follows a text that turns easy or hard.

    A long memory gives a steady estimate but follows a jump slowly. So a short one runs along, and when the two
    contradict each other beyond chance, the text has changed and the long one starts again from the short one.

    Args:
        prior: belief before the first round; it is forgotten like the rounds are.
        memory: drafted tokens after which an observation counts 1/e.
        recent: the same for the short memory.
    """

    def __init__(self, prior: Prior | None = None, memory: float = 500.0, recent: float = 25.0) -> None:
        self.prior = prior or Prior()
        self.memory, self.recent = memory, recent
        self._differed = self.prior.weight * self.prior.hazard
        self._agreed = self.prior.weight - self._differed
        self._agreed_lately = self._differed_lately = 0.0

    @property
    def differed(self) -> float:
        """First parameter of the Beta distribution: disagreements, what is left of the prior's included."""
        return self._differed + LEAST.weight * LEAST.hazard

    @property
    def agreed(self) -> float:
        """Second parameter of the Beta distribution: agreements, what is left of the prior's included."""
        return self._agreed + LEAST.weight * (1 - LEAST.hazard)

    @property
    def mean(self) -> float:
        """Expected hazard."""
        return self.differed / (self.differed + self.agreed)

    def bound(self, deviations: float) -> float:
        """Return a hazard that the true one is above (``deviations`` < 0) or below (> 0), -2 and 2 for 95 % between them.

        Wilson's interval on the counts: close to the quantiles of the Beta distribution, without needing them, and
        wide when there is little evidence.
        """
        return _wilson(self.differed, self.agreed, deviations)

    def observe(self, drafted: int, accepted: int) -> None:
        """Take in one round: ``drafted`` tokens of which the first ``accepted`` agreed with the full KV.

        Raises:
            ValueError: that cannot be.
        """
        if not 0 <= accepted <= drafted:
            raise ValueError(f"{accepted} of {drafted} drafted tokens accepted")
        if not drafted:
            return
        failed = accepted < drafted
        kept = math.exp(-(accepted + failed) / self.memory)
        self._agreed = self._agreed * kept + accepted
        self._differed = self._differed * kept + failed
        kept = math.exp(-(accepted + failed) / self.recent)
        self._agreed_lately = self._agreed_lately * kept + accepted
        self._differed_lately = self._differed_lately * kept + failed
        low, high = (_wilson(self._differed_lately, self._agreed_lately, side * BEYOND_CHANCE) for side in (-1, 1))
        if not low <= self.mean <= high:
            self._agreed, self._differed = self._agreed_lately, self._differed_lately

    def expected_accepted(self, most: int) -> list[float]:
        """Accepted tokens to expect of windows 0 .. ``most``, uncertainty about the hazard included.

        The mean of ``(1 - h) ** i`` over the Beta distribution is a product of simple ratios; it lies above the
        power of the mean, the more so the less is known, which makes trying longer windows worth a little.
        """
        expected, survive, total = [0.0], 1.0, 0.0
        differed, agreed = self.differed, self.agreed
        for i in range(most):
            survive *= (agreed + i) / (differed + agreed + i)
            total += survive
            expected.append(total)
        return expected


def _wilson(differed: float, agreed: float, deviations: float) -> float:
    count, square = differed + agreed, deviations**2
    mean = differed / count
    middle = mean + square / (2 * count)
    half = deviations * math.sqrt(mean * (1 - mean) / count + square / (4 * count**2))
    return min(1.0, max(0.0, (middle + half) / (1 + square / count)))


def accepted_at(hazard: float, window: int) -> float:
    """Accepted tokens to expect of a window at a known hazard."""
    if hazard <= 0:
        return float(window)
    return (1 - hazard) * (1 - (1 - hazard) ** window) / hazard


WORTH: Final = 64.0
"""Drafted tokens that other requests' experience counts as at most: requests differ among themselves."""


class PriorBook:
    """Priors by compressor, from a calibration and from every round that has run since.

    Args:
        given: priors by key, such as those of a calibration file.
        memory: as for :class:`HazardEstimate`; long, since it averages over requests.
    """

    def __init__(self, given: Mapping[str, Prior] | None = None, memory: float = 5000.0) -> None:
        self._given = dict(given or {})
        self._memory = memory
        self._seen: dict[str, HazardEstimate] = {}

    def prior(self, key: str) -> Prior:
        """Return the prior for a new request whose compressor and options go by ``key``."""
        given = self._given.get(key, Prior())
        seen = self._seen.get(key)
        if seen is None:
            return given
        return Prior(seen.mean, min(seen.differed + seen.agreed, max(given.weight, WORTH)))

    def observe(self, key: str, drafted: int, accepted: int) -> None:
        """Take in one round of any request of that key; raises ValueError as :meth:`HazardEstimate.observe` does."""
        if key not in self._seen:
            self._seen[key] = HazardEstimate(self._given.get(key, Prior()), self._memory, self._memory)
        self._seen[key].observe(drafted, accepted)
