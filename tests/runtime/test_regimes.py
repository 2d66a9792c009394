"""The belief about a hidden hazard, against every path that it can have taken."""

from __future__ import annotations

import itertools
import random

import pytest

from vericache_core.runtime.hazard import Prior
from vericache_core.runtime.regimes import HAZARDS, TURN, RegimeBelief, Regimes

STATES = range(len(HAZARDS))


def paths(shares: list[float], tokens: int) -> list[tuple[tuple[int, ...], float]]:
    """All sequences of states of so many tokens, with their chances: the naive reference."""
    found = []
    for path in itertools.product(STATES, repeat=tokens):
        chance = shares[path[0]]
        for before, after in itertools.pairwise(path):
            chance *= (1 - TURN) * (before == after) + TURN * shares[after]
        found.append((path, chance))
    return found


def test_expected_tokens_equal_those_over_all_paths() -> None:
    regimes = Regimes(Prior(0.1, 5.0))
    expected = [0.0] * 4
    for path, chance in paths(regimes.shares, 3):
        survive = 1.0
        for at, state in enumerate(path):
            survive *= 1 - HAZARDS[state]
            for window in range(at + 1, 4):
                expected[window] += chance * survive
    assert RegimeBelief(regimes).expected_accepted(3) == pytest.approx(expected)


@pytest.mark.parametrize(("drafted", "accepted"), [(1, 1), (1, 0), (2, 1), (2, 2), (3, 1)])
def test_a_round_is_weighed_as_over_all_paths(drafted: int, accepted: int) -> None:
    """The next token's hazard; a token that nobody has drafted lies between when all have agreed."""
    regimes = Regimes(Prior(0.1, 1e9))  # so sure that it learns nothing, as the reference does
    belief = RegimeBelief(regimes)
    shares = regimes.shares
    belief.observe(drafted, accepted)
    mean = total = 0.0
    for path, chance in paths(shares, accepted + 2):
        for state in path[:accepted]:
            chance *= 1 - HAZARDS[state]  # noqa: PLW2901
        if accepted < drafted:
            chance *= HAZARDS[path[accepted]]  # noqa: PLW2901
        mean += chance * HAZARDS[path[-1]]
        total += chance
    own = RegimeBelief(regimes)
    assert belief.mean == pytest.approx(mean / total, rel=1e-6)
    assert belief.mean != pytest.approx(own.mean, rel=1e-3)


def test_a_failure_means_more_of_them_and_agreements_soon_fewer() -> None:
    regimes = Regimes()
    for _ in range(20):
        belief = RegimeBelief(regimes)
        for accepted in (16, 16, 2, 0, 16, 16):
            belief.observe(16, accepted)
    before = belief.expected_accepted(8)[8]
    belief.observe(8, 1)
    failed = belief.expected_accepted(8)[8]
    belief.observe(4, 4)
    belief.observe(8, 8)
    assert failed < 0.85 * before
    assert belief.expected_accepted(8)[8] > 0.95 * before


@pytest.mark.parametrize("hazard", [0.01, 0.1, 0.5])
def test_one_hazard_for_all_is_found(hazard: float) -> None:
    numbers, regimes = random.Random(1), Regimes()
    for _ in range(10):
        belief = RegimeBelief(regimes)
        for _ in range(60):
            accepted = next((at for at in range(8) if numbers.random() < hazard), 8)
            belief.observe(8, accepted)
    fresh = RegimeBelief(regimes)
    naive = sum((1 - hazard) ** i for i in range(1, 9))
    assert fresh.expected_accepted(8)[8] == pytest.approx(naive, rel=0.25)


def test_a_request_that_is_hard_throughout_believes_in_itself() -> None:
    regimes = Regimes()
    easy, hard = RegimeBelief(regimes), RegimeBelief(regimes)
    for _ in range(40):
        easy.observe(8, 8)
        hard.observe(8, 0)
    for belief in (easy, hard):
        for _ in range(100):  # plain tokens, after which only what is drawn how often counts
            belief.observe(0, 0)
    assert hard.mean > 5 * easy.mean


def test_without_drafts_it_forgets_what_is_now_but_not_how_often() -> None:
    regimes = Regimes(Prior(0.05, 1e9))
    belief = RegimeBelief(regimes)
    start = belief.mean
    belief.observe(4, 0)
    assert belief.mean > 3 * start
    for _ in range(200):
        belief.observe(0, 0)
    assert belief.mean == pytest.approx(start, rel=0.2)


@pytest.mark.parametrize("hazard", [0.002, 0.05, 0.4, 0.9])
def test_a_prior_gives_its_mean(hazard: float) -> None:
    assert RegimeBelief(Regimes(Prior(hazard, 8.0))).mean == pytest.approx(hazard, rel=1e-3)


def test_a_prior_out_of_reach_gives_the_nearest_hazard() -> None:
    assert RegimeBelief(Regimes(Prior(1e-6, 8.0))).mean == pytest.approx(HAZARDS[0], rel=0.02)
    assert RegimeBelief(Regimes(Prior(1 - 1e-6, 8.0))).mean == pytest.approx(HAZARDS[-1], rel=0.02)


def test_a_credible_hazard_leaves_no_more_than_the_doubt_above_it() -> None:
    belief = RegimeBelief(Regimes())
    assert belief.credible(0.5) < belief.credible(0.05) < belief.credible(0.001) == HAZARDS[-1]
    for _ in range(30):
        belief.observe(16, 16)
    assert belief.credible(0.01) <= HAZARDS[5]


def test_what_cannot_be_is_refused() -> None:
    for drafted, accepted in [(1, 2), (1, -1)]:
        with pytest.raises(ValueError, match="accepted"):
            RegimeBelief(Regimes()).observe(drafted, accepted)
