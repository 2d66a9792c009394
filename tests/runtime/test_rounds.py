from __future__ import annotations

import dataclasses
import math

import pytest

from vericache_core.errors import ConfigError
from vericache_core.runtime.costs import CostModel, Link
from vericache_core.runtime.rounds import MOST, RoundPricer, Situation, round_seconds, speculation_seconds

COSTS = CostModel({8: 0.02, 32: 0.03}, read=1e-9, pair=1e-7, links={"host": Link(0, 1e-8)}, layers=10)
ALONE = Situation(1, tokens=1000, full_bytes=4e6, draft_bytes=1e6)


def block(rows: int, reading: float = 0.004, tokens: int = 1000) -> float:
    """Attention of so many rows, more than one, to full KV unless told otherwise."""
    return math.hypot(reading, tokens * rows * 1e-7)


def test_a_plain_token_reads_the_full_kv_and_a_share_of_the_step() -> None:
    assert round_seconds(COSTS, ALONE, 0) == pytest.approx(0.02 + 0.004)
    assert round_seconds(COSTS, dataclasses.replace(ALONE, requests=4), 0) == pytest.approx(0.02 / 4 + 0.004)


def test_a_round_of_one_request_alone_is_its_drafts_and_one_larger_step() -> None:
    expected = 10 * (0.02 + 0.001) + 0.03 + block(11)
    assert round_seconds(COSTS, ALONE, 10) == pytest.approx(expected)


def test_verifies_of_many_requests_are_spread_over_the_steps() -> None:
    """With more requests than drafts in a window every step verifies some: 8 requests, windows of 3, 2 verifies a step."""
    many = dataclasses.replace(ALONE, requests=8)
    expected = 3 * 0.001 + block(4) + 4 * 0.03 / 8
    assert round_seconds(COSTS, many, 3) == pytest.approx(expected)


def test_a_step_carries_whole_verifies() -> None:
    """8 requests, windows of 2: two steps of three carry 3 verifies, 14 rows, and the third has 2, with 12."""
    costs = dataclasses.replace(COSTS, shapes={8: 0.02, 12: 0.03, 32: 0.06})
    expected = 2 * 0.001 + block(3) + (2 * 0.06 + 0.03) / 8
    assert round_seconds(costs, dataclasses.replace(ALONE, requests=8), 2) == pytest.approx(expected)


def test_a_swap_hides_behind_the_whole_round_and_the_link_is_shared() -> None:
    short = dataclasses.replace(ALONE, swap_bytes=1e6)
    assert round_seconds(COSTS, short, 10) == round_seconds(COSTS, ALONE, 10)
    assert round_seconds(COSTS, short, 0) == round_seconds(COSTS, ALONE, 0)
    long = dataclasses.replace(ALONE, requests=4, swap_bytes=1e9, swapping=2, ahead=True)
    assert round_seconds(COSTS, long, 10) == pytest.approx(10 * 2 / 4)


def test_a_request_waits_for_its_own_swap() -> None:
    alone = dataclasses.replace(ALONE, swap_bytes=1e7)
    assert round_seconds(COSTS, alone, 10) == pytest.approx(10 * (0.02 + 0.001) + 0.1)
    assert round_seconds(COSTS, dataclasses.replace(alone, ahead=True), 10) == round_seconds(COSTS, ALONE, 10)


def test_a_verify_beside_the_steps_of_others_has_rows_of_its_own_and_lands_when_a_step_ends() -> None:
    """Four requests, steps of 24 ms that draft: ten drafts, the verifies of three others, and its own swap."""
    many = dataclasses.replace(ALONE, requests=4, swap_bytes=1e7, swapping=4)
    verify = 0.03 + block(11)
    assert round_seconds(COSTS, many, 10) == pytest.approx((10 * 0.024 + 3 * verify + 0.1 + 0.012) / 4)
    assert round_seconds(COSTS, many, 1) == pytest.approx(0.1 + 0.012)  # the link decides
    assert round_seconds(COSTS, many, 0) == pytest.approx(0.1)  # nobody drafts beside it
    busy = dataclasses.replace(many, full_bytes=2e8)
    verify = 0.03 + block(11, 0.2)
    assert round_seconds(COSTS, busy, 10) == pytest.approx((10 * 0.024 + 4 * verify) / 4)


def test_in_lock_step_a_swap_hides_behind_its_verify_only() -> None:
    lockstep = dataclasses.replace(ALONE, requests=2, swap_bytes=3e6, swapping=2, lockstep=True)
    drafting = 10 * (0.02 / 2 + 0.001)
    verify = block(11) + 0.03 / 2
    assert round_seconds(COSTS, lockstep, 10) == pytest.approx(drafting + COSTS.overlapped(verify, 0.03))


def test_a_proposer_makes_draft_steps_fewer_and_wider() -> None:
    """Ten drafts by five steps of two rows; the second row of a step costs the arithmetic of what was kept."""
    proposing = dataclasses.replace(ALONE, drafts_per_step=2.0, proposed=1.0)
    expected = 5 * (0.02 + block(2, 0.001, 250)) + 0.03 + block(11)
    assert round_seconds(COSTS, proposing, 10) == pytest.approx(expected)
    assert round_seconds(COSTS, proposing, 0) == round_seconds(COSTS, ALONE, 0)
    lockstep = dataclasses.replace(proposing, requests=2, lockstep=True)
    drafting = 5 * (0.02 / 2 + block(2, 0.001, 250))
    assert round_seconds(COSTS, lockstep, 10) == pytest.approx(drafting + block(11) + 0.03 / 2)


def test_speculation_pays_rows_and_no_drafts() -> None:
    assert speculation_seconds(COSTS, ALONE, 0) == round_seconds(COSTS, ALONE, 0)
    assert speculation_seconds(COSTS, ALONE, 9) == pytest.approx(0.03 + block(10))
    swapped = dataclasses.replace(ALONE, swap_bytes=1e9)
    assert speculation_seconds(COSTS, swapped, 9) == pytest.approx(10.0)
    lockstep = dataclasses.replace(ALONE, swap_bytes=3e6, lockstep=True)
    assert speculation_seconds(COSTS, lockstep, 9) == pytest.approx(COSTS.overlapped(0.03 + block(10), 0.03))
    assert RoundPricer(COSTS).speculation_prices(ALONE, 3) == tuple(
        speculation_seconds(COSTS, ALONE, count) for count in range(4)
    )


def test_prices_list_every_window_and_alike_situations_share_them() -> None:
    pricer = RoundPricer(COSTS)
    prices = pricer.prices(ALONE)
    assert prices == tuple(round_seconds(COSTS, ALONE, window) for window in range(MOST + 1))
    assert pricer.prices(dataclasses.replace(ALONE, tokens=1001)) is prices
    for change in (
        {"tokens": 1100},
        {"requests": 2},
        {"full_bytes": 5e6},
        {"draft_bytes": 2e6},
        {"lockstep": True},
        {"ahead": True, "swap_bytes": 1e7},
    ):
        assert pricer.prices(dataclasses.replace(ALONE, **change)) != prices
    with pytest.raises(ConfigError, match="'disk'"):
        pricer.prices(dataclasses.replace(ALONE, swap_bytes=1.0, tier="disk"))
