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


class HazardEstimate:
    """Belief about one request's hazard; newer rounds count more, so that it follows a text that turns easy or hard.

    Args:
        prior: belief before the first round; forgetting never goes below it.
        memory: drafted tokens after which an observation counts 1/e.
    """

    def __init__(self, prior: Prior | None = None, memory: float = 200.0) -> None:
        self.prior = prior or Prior()
        self.memory = memory
        self._agreed = 0.0
        self._differed = 0.0

    @property
    def differed(self) -> float:
        """First parameter of the Beta distribution: disagreements, those of the prior included."""
        return self._differed + self.prior.weight * self.prior.hazard

    @property
    def agreed(self) -> float:
        """Second parameter of the Beta distribution: agreements, those of the prior included."""
        return self._agreed + self.prior.weight * (1 - self.prior.hazard)

    @property
    def mean(self) -> float:
        """Expected hazard."""
        return self.differed / (self.differed + self.agreed)

    def bound(self, deviations: float) -> float:
        """Return a hazard that the true one is above (``deviations`` < 0) or below (> 0), -2 and 2 for 95 % between them.

        Wilson's interval on the counts: close to the quantiles of the Beta distribution, without needing them, and
        wide when there is little evidence.
        """
        count, mean, square = self.differed + self.agreed, self.mean, deviations**2
        middle = mean + square / (2 * count)
        half = deviations * math.sqrt(mean * (1 - mean) / count + square / (4 * count**2))
        return min(1.0, max(0.0, (middle + half) / (1 + square / count)))

    def observe(self, drafted: int, accepted: int) -> None:
        """Take in one round: ``drafted`` tokens of which the first ``accepted`` agreed with the full KV.

        Raises:
            ValueError: that cannot be.
        """
        if not 0 <= accepted <= drafted:
            raise ValueError(f"{accepted} of {drafted} drafted tokens accepted")
        failed = accepted < drafted
        kept = math.exp(-(accepted + failed) / self.memory)
        self._agreed = self._agreed * kept + accepted
        self._differed = self._differed * kept + failed

    def restart(self) -> None:
        """Forget every round: what was seen belongs to another stretch of text."""
        self._agreed = self._differed = 0.0

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


def accepted_at(hazard: float, window: int) -> float:
    """Accepted tokens to expect of a window at a known hazard."""
    if hazard <= 0:
        return float(window)
    return (1 - hazard) * (1 - (1 - hazard) ** window) / hazard


WORTH: Final = 24.0
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
            self._seen[key] = HazardEstimate(self._given.get(key, Prior()), self._memory)
        self._seen[key].observe(drafted, accepted)
