"""Speculation on full KV: how many proposals are worth their rows, and what a token costs that way.

A round without drafts may carry proposals, one row of the verify each and no draft step before. Whether that beats drafting
is known even while a request drafts: once tokens are committed, the proposer is asked what it would have proposed before
each of them, which costs a look into its table and no model step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol

from vericache_core.runtime.hazard import HazardEstimate, Prior
from vericache_core.runtime.regimes import RegimeBelief, Regimes

MOST_PROPOSALS: Final = 16
"""Proposals that one row of the full KV each may be spent on."""
_MEMORY: Final = 100.0
"""Rounds after which having had no proposal counts 1/e."""


class ProposalExperience:
    """Experience of all requests with their proposals; before any, that half of the rounds have one and a third is wrong.

    Proposals hold while a text is copied and fail where it is not, so whether they do is a hazard that jumps.
    """

    def __init__(self) -> None:
        self.none = HazardEstimate(Prior(0.5, 4.0), memory=5000.0)
        self.wrong = Regimes(Prior(0.3, 8.0))


class Replayable(Protocol):
    """A proposer that can be asked afterwards, for nothing."""

    def look_up(self, tokens: Sequence[int], drafts: Sequence[int], most: int) -> list[int]:
        """Up to ``most`` tokens that may follow, as many as it knows."""

    def replay(self, tokens: Sequence[int], start: int, most: int) -> list[tuple[int, int]]:
        """``(proposed, agreed)`` of the rounds that speculation would have taken from ``tokens[start]`` to the end."""


class ProposalBelief:
    """How often there are proposals, and how far they hold.

    Args:
        experience: of all requests, that it begins with and adds to.
    """

    def __init__(self, experience: ProposalExperience) -> None:
        self._experience = experience
        self._none = HazardEstimate(experience.none.learnt, _MEMORY)
        self._wrong = RegimeBelief(experience.wrong)

    def observe(self, proposed: int, agreed: int) -> None:
        """Take in a round: ``proposed`` tokens, 0 if there was nothing to propose, of which ``agreed`` held."""
        found = int(proposed > 0)
        self._none.observe(1, found)
        self._experience.none.observe(1, found)
        self._wrong.observe(proposed, agreed)

    def best(self, prices: Sequence[float]) -> tuple[int, float]:
        """``(proposals, seconds a token)`` that are cheapest.

        Args:
            prices: seconds of a round with 0, 1, ... proposals.
        """
        share = 1 - self._none.mean
        expected = self._wrong.expected_accepted(len(prices) - 1)
        costs = [
            ((1 - share) * prices[0] + share * price) / (1 + share * accepted)
            for price, accepted in zip(prices, expected, strict=True)
        ]
        least = min(range(len(costs)), key=costs.__getitem__)
        return least, costs[least]


class SpeculationPace:
    """How one request speculates on its full KV.

    Args:
        proposer: of the request.
        experience: as for :class:`ProposalBelief`.
        prices: seconds of a round with 0 .. ``MOST_PROPOSALS`` proposals, now.
        start: tokens of the prompt.
    """

    def __init__(
        self, proposer: Replayable, experience: ProposalExperience, prices: Callable[[], Sequence[float]], start: int
    ) -> None:
        self._proposer, self._prices, self._seen = proposer, prices, start
        self._belief = ProposalBelief(experience)

    def propose(self, tokens: Sequence[int], most: int) -> list[int]:
        """As many tokens as are worth their rows, ``most`` at most."""
        return self._proposer.look_up(tokens, (), min(most, self._belief.best(self._prices())[0]))

    def seconds_per_token(self) -> float:
        """What a token costs by speculation on full KV."""
        return self._belief.best(self._prices())[1]

    def weigh(self, rounds: Sequence[float]) -> tuple[float, ...]:
        """Seconds of ``rounds`` by window, where one without drafts may ask for more than a plain token."""
        return (min(rounds[0], self.seconds_per_token()), *rounds[1:])

    def round_ended(self, tokens: Sequence[int]) -> None:
        """Compare what the full KV has added to ``tokens`` with what would have been proposed."""
        for proposed, agreed in self._proposer.replay(tokens, self._seen, MOST_PROPOSALS):
            self._belief.observe(proposed, agreed)
        self._seen = len(tokens)
