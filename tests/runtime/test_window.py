"""Rounds are drawn from a hazard and paid at given prices: a simulation of one request at a time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest

from vericache_core.runtime.costs import CostModel
from vericache_core.runtime.hazard import Prior
from vericache_core.runtime.rounds import WINDOWS, RoundPricer, Situation
from vericache_core.runtime.window import Experience, WindowController, WindowPolicy

CPU = CostModel({8: 0.04, 32: 0.045, 128: 0.1}, read=1 / 18e9, pair=2.5e-8, layers=30)
PRICES = RoundPricer(CPU).prices(Situation(8, tokens=7000, full_bytes=161e6, draft_bytes=40e6))
"""Eight requests of the small model on a CPU: drafting gains at most 1.7x, so that mistakes show."""

Hazard = Callable[[int], float]


def accepted(numbers: random.Random, hazard: Hazard, at: int, drafted: int) -> int:
    count = 0
    while count < drafted and numbers.random() >= hazard(at + count):
        count += 1
    return count


def adaptive(
    hazard: Hazard,
    tokens: int,
    seed: int,
    experience: Experience | None = None,
    prices: Sequence[float] = PRICES,
    horizon: int | None = None,
) -> tuple[float, WindowController]:
    """Seconds of one request, which might have generated ``horizon`` tokens, and its controller."""
    numbers, at, seconds = random.Random(seed), 0, 0.0
    controller = WindowController(experience or Experience(), horizon or tokens)
    while at < tokens:
        drafted = min(controller.choose(prices), tokens - at - 1)
        kept = accepted(numbers, hazard, at, drafted)
        controller.observe(drafted, kept, prices)
        at, seconds = at + kept + 1, seconds + prices[drafted]
    controller.close()
    return seconds, controller


def static(hazard: Hazard, tokens: int, seed: int, window: int) -> float:
    numbers, at, seconds = random.Random(seed), 0, 0.0
    while at < tokens:
        drafted = min(window, tokens - at - 1)
        at, seconds = at + accepted(numbers, hazard, at, drafted) + 1, seconds + PRICES[drafted]
    return seconds


def best_static(hazards: Sequence[Hazard], tokens: int) -> float:
    return min(sum(static(hazard, tokens, seed, x) for seed, hazard in enumerate(hazards)) for x in WINDOWS)


@pytest.mark.parametrize("hazard", [0.005, 0.02, 0.05, 0.1, 0.2, 0.4])
def test_on_a_uniform_workload_it_is_within_two_percent_of_the_best_static_window(hazard: float) -> None:
    hazards, experience = [lambda _: hazard] * 20, Experience()
    seconds = sum(adaptive(each, 1000, seed, experience)[0] for seed, each in enumerate(hazards))
    assert seconds <= 1.02 * best_static(hazards, 1000)


@pytest.mark.parametrize("tokens", [128, 1000])
def test_with_easy_and_hard_requests_it_beats_every_static_window(tokens: int) -> None:
    hazards: list[Hazard] = [lambda _: 0.01, lambda _: 0.5] * 10
    experience = Experience()
    seconds = sum(adaptive(each, tokens, seed, experience)[0] for seed, each in enumerate(hazards))
    assert seconds < 0.92 * best_static(hazards, tokens)


def test_with_easy_and_hard_stretches_in_each_request_it_is_no_slower_than_any_static_window() -> None:
    hazards: list[Hazard] = [lambda at: 0.01 if at % 600 < 300 else 0.5] * 10
    experience = Experience()
    seconds = sum(adaptive(each, 2000, seed, experience)[0] for seed, each in enumerate(hazards))
    assert seconds < best_static(hazards, 2000)


@pytest.mark.parametrize("tokens", [64, 128, 1000])
@pytest.mark.parametrize("known", [False, True])
def test_an_adversary_costs_at_most_three_percent(tokens: int, known: bool) -> None:
    experience = Experience() if known else None
    for seed in range(20):
        assert adaptive(lambda _: 1.0, tokens, seed, experience)[0] <= tokens * PRICES[0] / 0.97


@pytest.mark.parametrize("requests", [2, 8, 32])
def test_of_requests_side_by_side_none_loses_more_than_its_share_while_nobody_gains(requests: int) -> None:
    """They bet before the first verdict is in, and an answer is as late as its own losses make it."""
    experience = Experience()
    controllers, lost = [WindowController(experience, 128) for _ in range(requests)], [0.0] * requests
    for _ in range(128):
        windows = [controller.choose(PRICES) for controller in controllers]
        for number, (controller, drafted) in enumerate(zip(controllers, windows, strict=True)):
            controller.observe(drafted, 0, PRICES)
            lost[number] += PRICES[drafted] / PRICES[0] - 1
    assert max(lost) <= 0.025 * 128  # a bet allows for what a credible hazard accepts, so it may be lost by a little more


@pytest.mark.parametrize("tokens", [12, 40])
def test_an_adversary_costs_no_more_where_answers_end_early(tokens: int) -> None:
    """What a request was granted for tokens that it did not generate is not lost by those that follow."""
    experience, spent = Experience(), 0.0
    for seed in range(100):
        spent += adaptive(lambda _: 1.0, tokens, seed, experience, horizon=512)[0]
    assert spent <= (100 * tokens + 128) * PRICES[0] / 0.97


def test_an_adversary_that_first_wins_trust_costs_no_more_either() -> None:
    seconds, _ = adaptive(lambda at: 0.0 if at < 200 else 1.0, 1000, 1)
    assert seconds < 1000 * PRICES[0] / 0.97


def test_a_request_that_is_hard_at_first_is_tried_again_on_what_others_gain() -> None:
    """Alone it has lost what one request may lose, and decodes plainly to its end."""

    def late(experience: Experience) -> int:
        controller, at = WindowController(experience, 128), 0
        while at < 128:
            drafted = controller.choose(PRICES)
            kept = 0 if at < 12 else drafted
            controller.observe(drafted, kept, PRICES)
            at += kept + 1
        return controller.window

    assert late(Experience()) == 0
    experience = Experience()
    for seed in range(4):
        adaptive(lambda _: 0.005, 128, seed, experience)
    assert late(experience) >= 8


def test_it_comes_back_when_the_text_turns_easy() -> None:
    _, controller = adaptive(lambda at: 1.0 if at < 300 else 0.0, 1200, 1)
    assert controller.window >= 16
    assert controller.belief.mean < 0.02


def test_tries_become_rare_while_they_fail() -> None:
    controller, probes = WindowController(Experience(Prior(0.99, 1000)), 10_000), []
    for step in range(2000):
        window = controller.choose(PRICES)
        controller.observe(window, 0, PRICES)
        if window:
            probes.append(step)
    gaps = [after - before for before, after in itertools.pairwise(probes[1:])]  # the first spends what is granted
    assert gaps == sorted(gaps)
    assert gaps[-1] >= 500


def test_drafting_that_cannot_pay_is_never_tried() -> None:
    dear = [1.0 + 1.5 * window for window in range(65)]
    seconds, _ = adaptive(lambda _: 0.0, 500, 1, prices=dear)
    assert seconds == 500


def prices_with(**better: float) -> list[float]:
    """Half a second a token at every window, but for some."""
    return [1.0] + [(window + 1) * better.get(f"w{window}", 0.5) for window in range(1, 65)]


def test_a_small_difference_does_not_change_the_window() -> None:
    controller = WindowController(Experience(Prior(1e-6, 1e6)), 10**6)
    assert controller.choose(prices_with(w20=0.45)) == 20
    assert controller.choose(prices_with(w20=0.45, w30=0.447)) == 20
    assert controller.choose(prices_with(w20=0.45, w30=0.4)) == 30


def test_of_windows_that_are_as_good_it_takes_the_shortest() -> None:
    assert WindowController(Experience(Prior(1e-6, 1e6)), 10**6).choose(prices_with(w20=0.45, w30=0.447)) == 20
    assert WindowController(Experience(Prior(1e-6, 1e6)), 10**6).choose(prices_with(w20=0.45, w30=0.44)) == 30


def test_the_longest_window_is_obeyed() -> None:
    controller = WindowController(Experience(Prior(1e-6, 1e6)), 10**6, WindowPolicy(most=7))
    assert controller.choose(PRICES) == 7
