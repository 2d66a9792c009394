"""Adaptive windows against static ones, on hazards that differ and that change."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from vericache_core.cli import main as cli
from vericache_core.runtime.costs import CostModel
from vericache_core.runtime.rounds import MOST
from vericache_core.runtime.schedulable import Bytes
from vericache_core.runtime.trace import Arrival
from vericache_core.simulate.compare import Setup, simulate
from vericache_core.simulate.compression import Compression
from vericache_core.simulate.hardware import DEVICES, MODELS, cost_model
from vericache_core.simulate.windows import Search, search_windows

STATIC = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, MOST)
MIXED = ((0.01, 0.4), (0.5, 0.02), (0.03,))
"""Easy and hard requests, two of which turn into the other while they are written."""


def on_a_gpu(turns: Sequence[Sequence[float]], new_tokens: int, turn: int = 150) -> Setup:
    """Requests whose KV is read many times faster when compressed; nothing is known of their hazards beforehand."""
    model, device = MODELS["mistral-24b"], DEVICES["rtx-pro-6000"]
    arrivals = [Arrival(0.0, 20_000, new_tokens) for _ in range(9)]
    budget = Bytes(0.9 * device.memory - model.weights)
    return Setup(
        cost_model(device, model), model.token_bytes, budget, arrivals, Compression(0.2), "pinned", turns=turns, turn=turn
    )


def searched(turns: Sequence[Sequence[float]], new_tokens: int) -> Search:
    return search_windows(on_a_gpu(turns, new_tokens), STATIC)


def test_adaptive_windows_are_no_slower_than_the_best_static_one_where_hazards_differ_and_change() -> None:
    assert searched(MIXED, 600).ratio >= 1.0


@pytest.mark.parametrize("hazard", [0.01, 0.1])
def test_adaptive_windows_are_within_two_percent_of_the_best_static_one_where_all_is_alike(hazard: float) -> None:
    assert searched([[hazard]], 800).ratio >= 0.98


@pytest.mark.slow
def test_the_same_against_every_static_window() -> None:
    assert search_windows(on_a_gpu(MIXED, 600), seeds=range(3)).ratio >= 1.0
    for hazard in (0.005, 0.02, 0.05, 0.2):
        assert search_windows(on_a_gpu([[hazard]], 800), seeds=range(3)).ratio >= 0.98, hazard


def test_the_best_of_a_search_is_the_fastest_and_of_equals_the_shortest() -> None:
    found = Search({0: 1.0, 4: 3.0, 8: 3.0, 16: 2.0}, 3.3)
    assert found.best == 4
    assert found.ratio == pytest.approx(1.1)


def test_a_hazard_that_changes_is_that_of_the_token() -> None:
    """Every draft right for the first 50 tokens, none after that."""
    costs = CostModel({64: 1.0}, 0.0, 0.0)
    made = Setup(costs, 1, Bytes(1e9), [Arrival(0.0, 10, 100)], mode="pinned", window=9, turns=[[0.0, 1.0]], turn=50)
    assert simulate(made).accepted == 45


def test_the_command_ranks_the_windows(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["simulate", "--search-windows", "--mode", "pinned", "--device", "cpu-2", "-m", "smollm2-135m", "--requests", "2"]
    command += ["--prompt-tokens", "2000", "--new-tokens", "20", "--hazard", "0.01/0.5,0.02", "--hazard-turn", "10"]
    assert cli.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "vericache.simulate.windows/1"
    rates = {one["window"]: one["tokens_per_s"] for one in found["static"]}
    assert list(rates) == list(range(MOST + 1))
    assert found["best_static"] == max(rates, key=lambda window: rates[window])
    assert found["adaptive_over_best"] == pytest.approx(found["adaptive_tokens_per_s"] / max(rates.values()))
    assert cli.main(command) == 0
    assert len(capsys.readouterr().out.splitlines()) == MOST + 3
    for wrong in (["--window", "4"], ["--hazard", "0.1/2"], ["--hazard-turn", "0"]):
        assert cli.main([*command, *wrong]) == 2
    assert cli.main([*command, "--device", "h200"]) == 2
