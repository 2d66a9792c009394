"""Hazard: the chance that a drafted token differs from what the full KV says, given that all before it agreed.

One number says how good a compressor is for a request: with a constant hazard ``h`` a window of ``x`` drafts has
``sum((1 - h) ** i for i in 1..x)`` accepted tokens on average, which fits published acceptance curves of compressed
KV to half a token. A round is a censored geometric sample: its accepted tokens are successes, and only a round
that ended in a disagreement holds a failure.
"""

from __future__ import annotations

import math
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


LEAST: Final = Prior(0.05, 1.0)
"""What is left of a prior that was forgotten."""


WORTH: Final = 64.0
"""Drafted tokens that experience counts as at most, as somebody else's prior: requests and texts differ among themselves."""


class HazardEstimate:
    """Belief about one hazard, the same for all tokens; newer rounds count more.

    Args:
        prior: belief before the first round; it is forgotten like the rounds are.
        memory: drafted tokens after which an observation counts 1/e.
    """

    def __init__(self, prior: Prior | None = None, memory: float = 500.0) -> None:
        prior = prior or Prior()
        self._memory = memory
        self._differed = prior.weight * prior.hazard
        self._agreed = prior.weight - self._differed

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

    @property
    def learnt(self) -> Prior:
        """What a newcomer may believe from the start."""
        return Prior(self.mean, min(self.differed + self.agreed, WORTH))

    def observe(self, drafted: int, accepted: int) -> None:
        """Take in one round: ``drafted`` tokens of which the first ``accepted`` agreed with the full KV.

        Raises:
            ValueError: that cannot be.
        """
        if not 0 <= accepted <= drafted:
            raise ValueError(f"{accepted} of {drafted} drafted tokens accepted")
        failed = accepted < drafted
        kept = math.exp(-(accepted + failed) / self._memory)
        self._agreed = self._agreed * kept + accepted
        self._differed = self._differed * kept + failed


def accepted_at(hazard: float, window: int) -> float:
    """Accepted tokens to expect of a window at a known hazard."""
    if hazard <= 0:
        return float(window)
    return (1 - hazard) * (1 - (1 - hazard) ** window) / hazard
