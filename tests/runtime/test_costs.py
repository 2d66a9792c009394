from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from vericache_core.errors import ConfigError
from vericache_core.runtime.costs import Block, CostModel, Link, StepLoad, StepSample, SwapSample, _not_negative, fit

TRUE = CostModel({8: 0.02, 32: 0.03, 128: 0.08}, read=1e-10, pair=2e-8, links={"host": Link(0.001, 2e-10)}, layers=30)


def steps(numbers: random.Random, noise: float, model: CostModel = TRUE) -> list[StepSample]:
    samples = []
    for _ in range(60):
        block = Block(numbers.uniform(0, 1e9), numbers.choice([0, numbers.uniform(0, 2e6)]))
        load = StepLoad(numbers.choice([8, 32, 128]), (block,) * numbers.choice([1, 3]))
        samples.append(StepSample(load, model.compute_seconds(load) * numbers.uniform(1 - noise, 1 + noise)))
    return samples


def test_a_step_pays_its_padded_shape_and_its_attention() -> None:
    assert TRUE.compute_seconds(StepLoad(9)) == pytest.approx(0.03)
    assert TRUE.compute_seconds(StepLoad(9, (Block(1e9),))) == pytest.approx(0.03 + 0.1)
    assert [TRUE.padded(rows) for rows in (1, 8, 9, 128, 129)] == [8, 8, 32, 128, 256]
    assert TRUE.rows_seconds(300) == pytest.approx(3 * 0.08)


def test_of_one_block_the_shorter_of_reading_and_multiplying_hides_in_part() -> None:
    """0.03 s of reading and 0.04 s of multiplying take 0.05 s; one block hides nothing behind another."""
    assert TRUE.attention_seconds(3e8, 2e6) == pytest.approx(0.05)
    assert TRUE.attention_seconds(3e8) == pytest.approx(0.03)
    assert TRUE.compute_seconds(StepLoad(8, (Block(3e8), Block(0, 2e6), Block(3e8, 2e6)))) == pytest.approx(0.02 + 0.12)


def test_shapes_may_come_in_any_order() -> None:
    assert CostModel({32: 2.0, 8: 1.0}, 0, 0).padded(3) == 8


def test_a_swap_pays_latency_and_bytes_and_overlaps_layer_by_layer() -> None:
    assert TRUE.swap_seconds("host", 1e9) == pytest.approx(0.201)
    assert TRUE.swap_seconds("host", 0) == 0
    assert TRUE.overlapped(0.03, 0.3) == TRUE.overlapped(0.3, 0.03) == pytest.approx(0.301)
    with pytest.raises(ConfigError, match="'disk' tier"):
        TRUE.swap_seconds("disk", 1)


def test_the_fit_finds_the_costs_behind_noisy_measurements() -> None:
    numbers = random.Random(1)
    swaps = [SwapSample("host", size, TRUE.swap_seconds("host", size)) for size in (1e6, 1e7, 1e8, 1e9)]
    found = fit(steps(numbers, 0.03), swaps, layers=30)
    assert found.shapes == pytest.approx(dict(TRUE.shapes), rel=0.1)
    assert (found.read, found.pair) == pytest.approx((TRUE.read, TRUE.pair), rel=0.1)
    assert found.links["host"].latency == pytest.approx(0.001)
    assert found.links["host"].seconds_per_byte == pytest.approx(2e-10)
    assert found.layers == 30


def test_the_fit_of_exact_measurements_is_exact() -> None:
    """Blocks where one of reading and multiplying takes far longer tell both apart from the shapes."""
    loads = [StepLoad(8, (Block(5e7),) * 4), StepLoad(8, (Block(5e7, 8e3),) * 4)]
    for shape in TRUE.shapes:
        loads += [StepLoad(shape, (Block(shape / 2 * 2e4, shape * shape / 2),)), StepLoad(shape, (Block(5e7, shape * 2.5e3),))]
    slow = CostModel(TRUE.shapes, read=1e-10, pair=2e-7)
    found = fit([StepSample(load, slow.compute_seconds(load)) for load in loads], [], 1)
    assert found.shapes == pytest.approx(slow.shapes, rel=1e-4)
    assert (found.read, found.pair) == pytest.approx((slow.read, slow.pair), rel=1e-4)


def test_no_cost_is_below_zero_however_the_measurements_lie() -> None:
    numbers = random.Random(2)
    free = CostModel(TRUE.shapes, read=1e-10, pair=0.0)
    for _ in range(5):
        samples = [StepSample(s.load, s.seconds * (1 - s.load.blocks[0].pairs * 5e-8)) for s in steps(numbers, 0.02, free)]
        found = fit(samples, [SwapSample("host", 1e6, 0.01), SwapSample("host", 1e9, 0.009)], 1)
        assert found.pair == 0.0
        assert found.read == pytest.approx(1e-10, rel=0.2)
        assert found.links["host"].seconds_per_byte == 0.0


def error(rows: list[list[float]], seconds: list[float], costs: Sequence[float]) -> float:
    return sum(
        (sum(value * cost for value, cost in zip(row, costs, strict=True)) / time - 1) ** 2
        for row, time in zip(rows, seconds, strict=True)
    )


def test_the_best_costs_are_those_of_the_best_subset() -> None:
    """An optimum is an ordinary one over some of the unknowns: with few of them all subsets can be tried."""
    numbers, bound = random.Random(3), 0
    for _ in range(40):
        rows = [[numbers.choice([0.0, 1.0]), *(numbers.uniform(0, most) for most in (1, 1, 9))] for _ in range(9)]
        seconds = [numbers.uniform(0.5, 2) for _ in rows]
        relative = np.array(rows) / np.array(seconds)[:, None]
        least = float(len(rows))
        for count in range(1, 5):
            for subset in map(list, itertools.combinations(range(4), count)):
                costs = np.zeros(4)
                costs[subset] = np.linalg.lstsq(relative[:, subset], np.ones(len(rows)), rcond=None)[0]
                if (costs >= 0).all():
                    least = min(least, error(rows, seconds, costs.tolist()))
        found = _not_negative(rows, seconds)
        assert min(found) >= 0
        assert error(rows, seconds, found) == pytest.approx(least, rel=1e-6)
        bound += 0.0 in found
    assert 5 < bound < 40


def test_many_shapes_are_fitted_at_once() -> None:
    """Trying subsets would take longer than anybody waits once one cost is bound to zero."""
    shapes = {rows: 0.02 + 0.001 * rows for rows in range(8, 128, 4)}
    model = CostModel(shapes, read=1e-10, pair=0.0)
    samples = [
        StepSample(StepLoad(rows, blocks), model.compute_seconds(StepLoad(rows, blocks)) * sooner)
        for rows in shapes
        for blocks, sooner in (((), 1.0), ((Block(5e7),), 1.0), ((Block(5e7, 1e6),), 0.9))
    ]
    found = fit(samples, [], 1)
    assert found.pair == 0.0
    assert min(found.shapes.values()) > 0


def test_small_steps_count_as_much_as_large_ones() -> None:
    """Absolute errors would let a noisy large step bend the cost of a small one."""
    measured = {(): 0.001, (Block(1e9),): 1.2, (Block(2e9),): 1.8}
    samples = [StepSample(StepLoad(1, blocks), seconds) for blocks, seconds in measured.items()]
    assert fit(samples, [], 1).shapes[1] == pytest.approx(0.001, rel=0.05)


def test_what_was_never_measured_costs_nothing() -> None:
    found = fit([StepSample(StepLoad(8), 0.5)], [], 4)
    assert found.compute_seconds(StepLoad(8, (Block(1e9, 1e6),))) == pytest.approx(0.5)
    assert not found.links


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_times_that_cannot_be_are_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="seconds"):
        fit([StepSample(StepLoad(8), seconds)], [], 1)
    with pytest.raises(ConfigError, match="without a measured step"):
        fit([], [], 1)


def test_costs_that_cannot_be_are_refused() -> None:
    bad: list[dict[str, Any]] = [
        {"shapes": {}},
        {"shapes": {0: 1.0}},
        {"shapes": {1: -1.0}},
        {"read": float("nan")},
        {"links": {"host": Link(-1, 0)}},
        {"layers": 0},
    ]
    for part in bad:
        with pytest.raises(ValueError, match="cost"):
            CostModel(**{"shapes": {1: 1.0}, "read": 0.0, "pair": 0.0, **part})


def test_json_holds_everything() -> None:
    assert CostModel.from_json(TRUE.to_json()) == TRUE
