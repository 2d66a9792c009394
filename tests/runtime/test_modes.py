from __future__ import annotations

import dataclasses

import pytest

from vericache_core.errors import ConfigError
from vericache_core.runtime.costs import CostModel, Link
from vericache_core.runtime.modes import Demand, Mix, best_mix

# 50 GB of weights at 1.7 TB/s, a link of 50 GB/s: the paper's worked example.
GPU = CostModel({1: 0.029, 64: 0.03, 512: 0.04}, 1 / 1.7e12, 1e-12, {"host": Link(0, 1 / 50e9)}, 40)
LONG = Demand(25_000, 4e9, 1e9, 3e9, 4e9, hazard=0.02, new_tokens=1000, ahead=True)


def held(mix: Mix, demand: Demand = LONG) -> float:
    """Device bytes of a mix."""
    full = (mix.plain + mix.pinned) * demand.full_bytes
    return full + (mix.pinned + mix.offloaded) * demand.draft_bytes + (demand.transient_bytes if mix.offloaded else 0)


@pytest.mark.parametrize("budget", [5e9, 8e9, 20e9, 44e9, 100e9, 1e12])
@pytest.mark.parametrize("requests", [1, 3, 10, 100])
def test_the_budget_is_kept_and_plain_is_never_faster(budget: float, requests: int) -> None:
    mix = best_mix(GPU, LONG, requests, budget)
    assert held(mix) <= budget
    assert mix.plain + mix.pinned + mix.offloaded <= requests
    plain = best_mix(GPU, dataclasses.replace(LONG, hazard=1.0), requests, budget)
    assert mix.tokens_per_s >= plain.tokens_per_s


def test_scarce_memory_offloads_ample_memory_pins_and_between_some_of_each() -> None:
    scarce, between, ample = (best_mix(GPU, LONG, 30, budget) for budget in (20e9, 80e9, 200e9))
    assert scarce.offloaded > 10
    assert scarce.pinned == 0
    assert between.pinned
    assert between.offloaded
    assert ample.pinned == 30


def test_a_faster_link_gives_more() -> None:
    fast = best_mix(dataclasses.replace(GPU, links={"host": Link(0, 1 / 400e9)}), LONG, 16, 20e9)
    slow = best_mix(GPU, LONG, 16, 20e9)
    assert fast.tokens_per_s > slow.tokens_per_s


def test_drafts_that_are_never_accepted_mean_plain() -> None:
    mix = best_mix(GPU, dataclasses.replace(LONG, hazard=1.0), 10, 50e9)
    assert (mix.plain, mix.window) == (10, 0)
    assert mix.mode(0) == "plain"


def test_compressing_must_pay_within_the_answer() -> None:
    short = dataclasses.replace(LONG, new_tokens=2, setup_seconds=1.0)
    assert best_mix(GPU, short, 10, 50e9).plain
    assert not best_mix(GPU, dataclasses.replace(short, new_tokens=5000), 10, 50e9).plain


def test_a_gain_within_the_error_of_the_costs_is_no_reason_to_draft() -> None:
    lone = dataclasses.replace(LONG, hazard=0.9)
    mix = best_mix(GPU, lone, 1, 10e9)
    assert mix.plain == 1


def test_a_request_that_does_not_fit_is_refused_and_one_that_fits_offloaded_runs() -> None:
    assert best_mix(GPU, dataclasses.replace(LONG, transient_bytes=0.4e9), 5, 1.5e9).offloaded == 1
    with pytest.raises(ConfigError, match="too small for one request") as caught:
        best_mix(GPU, LONG, 5, 3.9e9)
    assert "25000 tokens" in str(caught.value.cause)


def test_in_lock_step_all_verify_at_once() -> None:
    assert best_mix(GPU, LONG, 100, 20e9, lockstep=True).offloaded <= 4
    assert best_mix(GPU, LONG, 100, 20e9).offloaded >= 12


def test_room_for_more_swaps_may_be_worth_more_than_another_request() -> None:
    mix = best_mix(GPU, dataclasses.replace(LONG, transient_bytes=6e9), 100, 30e9, modes=("offloaded",))
    assert mix.offloaded < 24
    free = best_mix(GPU, dataclasses.replace(LONG, transient_bytes=0.0), 100, 30e9, modes=("offloaded",))
    assert free.offloaded > mix.offloaded


def test_the_last_turn_counts() -> None:
    whole = best_mix(GPU, LONG, 20, 40e9, modes=("plain",))
    broken = best_mix(GPU, LONG, 11, 40e9, modes=("plain",))
    alone = best_mix(GPU, LONG, 1, 40e9, modes=("plain",))
    assert (whole.plain, broken.plain) == (10, 10)
    assert 11 / broken.tokens_per_s == pytest.approx(10 / whole.tokens_per_s + 1 / alone.tokens_per_s)
    fixed = [best_mix(GPU, LONG, count, 12e9, modes=("offloaded",), windows=(20,)) for count in (8, 9)]
    assert fixed[1].tokens_per_s < 0.95 * fixed[0].tokens_per_s


def test_the_choice_can_be_narrowed() -> None:
    assert best_mix(GPU, LONG, 30, 80e9, modes=("offloaded",)).pinned == 0
    assert best_mix(GPU, LONG, 30, 80e9, modes=("pinned",)).offloaded == 0
    assert best_mix(GPU, LONG, 30, 80e9, modes=("plain",)).plain == 20
    assert best_mix(GPU, LONG, 30, 80e9, modes=("pinned",), windows=(13,)).window == 13
    with pytest.raises(ConfigError, match="too small") as caught:
        best_mix(GPU, LONG, 30, 4.5e9, modes=("pinned",))
    assert "5.0 GB (5,000,000,000 bytes)" in str(caught.value.cause)


def test_requests_are_pinned_until_the_mix_has_enough() -> None:
    mix = Mix(0, 2, 5, 20, 100.0)
    assert [mix.mode(now) for now in (0, 1, 2, 7)] == ["pinned", "pinned", "offloaded", "offloaded"]
