from __future__ import annotations

import random

import pytest

from vericache_core.runtime.hazard import WORTH, HazardEstimate, Prior, accepted_at


def run(random_numbers: random.Random, hazard: float, window: int) -> int:
    for accepted in range(window):
        if random_numbers.random() < hazard:
            return accepted
    return window


@pytest.mark.parametrize("hazard", [0.01, 0.05, 0.3, 0.9])
def test_the_hazard_is_found(hazard: float) -> None:
    numbers, means = random.Random(1), []
    for _ in range(200):
        estimate = HazardEstimate(Prior(0.05, 1), memory=1e9)
        for _ in range(60):
            estimate.observe(8, run(numbers, hazard, 8))
        means.append(estimate.mean)
    assert sum(means) / len(means) == pytest.approx(hazard, rel=0.05, abs=0.002)


def test_a_round_that_ran_to_its_end_holds_no_failure() -> None:
    full, cut = HazardEstimate(Prior(0.2, 10)), HazardEstimate(Prior(0.2, 10))
    for _ in range(30):
        full.observe(5, 5)
        cut.observe(6, 5)
    assert full.mean < 0.03
    assert cut.mean == pytest.approx(1 / 6, rel=0.1)


def test_what_lies_behind_a_disagreement_says_nothing() -> None:
    short, long = HazardEstimate(), HazardEstimate()
    short.observe(3, 2)
    long.observe(64, 2)
    assert short.mean == long.mean


def test_it_follows_a_change() -> None:
    numbers, estimate = random.Random(2), HazardEstimate(memory=100)
    for _ in range(100):
        estimate.observe(16, run(numbers, 0.01, 16))
    assert estimate.mean < 0.03
    for _ in range(100):
        estimate.observe(16, run(numbers, 0.4, 16))
    assert estimate.mean > 0.25


def test_accepted_at_is_the_sum_of_powers() -> None:
    for hazard in (0.0, 0.1, 1.0):
        assert accepted_at(hazard, 7) == pytest.approx(sum((1 - hazard) ** i for i in range(1, 8)))


def test_a_round_without_drafts_teaches_nothing() -> None:
    estimate = HazardEstimate(Prior(0.1, 4))
    before = estimate.differed, estimate.agreed
    estimate.observe(0, 0)
    assert (estimate.differed, estimate.agreed) == before


def test_a_wrong_prior_is_forgotten() -> None:
    numbers, estimate = random.Random(6), HazardEstimate(Prior(0.97, 1000))
    for _ in range(500):
        estimate.observe(8, run(numbers, 0.02, 8))
    assert estimate.mean < 0.1


def test_impossible_rounds_and_priors_are_refused() -> None:
    for drafted, accepted in ((3, 4), (3, -1)):
        with pytest.raises(ValueError, match="accepted"):
            HazardEstimate().observe(drafted, accepted)
    for hazard, weight in ((0.0, 1.0), (1.0, 1.0), (0.5, 0.0), (float("nan"), 1.0), (0.5, float("inf"))):
        with pytest.raises(ValueError, match="expected a"):
            Prior(hazard, weight)


def test_what_is_handed_on_counts_as_no_more_than_a_request() -> None:
    estimate = HazardEstimate(Prior(0.02, 30))
    assert estimate.learnt.weight == pytest.approx(31)
    for _ in range(300):
        estimate.observe(4, 0)
    assert estimate.learnt.hazard > 0.85
    assert estimate.learnt.weight == WORTH
