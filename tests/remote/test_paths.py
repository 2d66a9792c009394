"""The cost model of the six paths, and which part of a prompt counts as its prefix."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest

from vericache_core.remote.paths import PATHS, Path, Task, best_window, choose_path, cycle_seconds, path_seconds, plain_seconds
from vericache_core.remote.prefixes import NAMED, Prefixes, common
from vericache_core.remote.receive import Delivery
from vericache_core.runtime.costs import CostModel
from vericache_core.runtime.hazard import accepted_at

COSTS = CostModel({8: 0.02, 32: 0.025, 128: 0.05}, read=2e-10, pair=1e-7)
TASK = Task(
    requests=8,
    prefix=6000,
    new_tokens=64,
    full_bytes=138e6,
    kept=0.25,
    hazard=0.03,
    latency=0.001,
    bandwidth=12.5e6,
    reload=4e9,
)


def changed(**fields: Any) -> Task:
    return dataclasses.replace(TASK, **fields)


def test_equation_four_by_hand() -> None:
    window = best_window(COSTS, TASK)
    expected = (
        0.001
        + 0.25 * 138e6 / 12.5e6
        + 64 / (accepted_at(0.03, window) + 1) * cycle_seconds(COSTS, TASK, window, stateless=False)
    )
    assert path_seconds(COSTS, TASK, "verify") == pytest.approx(expected)
    assert path_seconds(COSTS, TASK, "fetch") == pytest.approx(0.001 + 138e6 / 12.5e6 + 64 * plain_seconds(COSTS, TASK))
    assert path_seconds(COSTS, changed(here=True), "verify") == pytest.approx(expected - 0.25 * 138e6 / 12.5e6)


def test_what_changes_the_choice() -> None:
    drafting: tuple[Path, ...] = ("verify", "fetch", "stream")
    assert choose_path(COSTS, TASK, drafting) == "verify"
    assert choose_path(COSTS, changed(bandwidth=1e12, hazard=0.9), ("verify", "fetch")) == "fetch", "a fast link"
    assert choose_path(COSTS, changed(hazard=0.9, new_tokens=5000), drafting) in {"fetch", "stream"}, "bad drafts"
    assert choose_path(COSTS, changed(bandwidth=1e3), ("local", "fetch", "verify")) == "local", "hardly any link"
    assert choose_path(COSTS, changed(new_tokens=1), PATHS) == "remote", "one token is the store's anyway"


def test_costs_grow_as_they_should() -> None:
    for path in PATHS:
        assert path_seconds(COSTS, changed(new_tokens=128), path) > path_seconds(COSTS, TASK, path)
    for path in ("verify", "stream", "fetch"):
        assert path_seconds(COSTS, changed(bandwidth=1e6), path) > path_seconds(COSTS, TASK, path)
    assert path_seconds(COSTS, changed(reload=1e8), "verify-stateless") > path_seconds(COSTS, TASK, "verify-stateless")
    assert path_seconds(COSTS, TASK, "verify-stateless") >= path_seconds(COSTS, TASK, "verify")
    assert best_window(COSTS, changed(hazard=0.005)) > best_window(COSTS, changed(hazard=0.3))
    assert best_window(COSTS, changed(latency=1.0)) > best_window(COSTS, TASK), "a slow answer is worth more drafts"


def test_prefixes_are_found() -> None:
    shared = list(range(100))
    prefixes = Prefixes()
    first = prefixes.of([*shared, 7, 8], [[*shared, 9, 9], [1, 2]])
    assert first.ids == tuple(shared)
    assert prefixes.of([*shared, 5, 5, 5], []) is first, "the one that is here"
    alone = prefixes.of([3, 4, 5], [[3, 4, 6]])
    assert alone.ids == (3, 4), "too little in common: all but the last token"
    assert len(prefixes.of([*shared, *range(1000, 1200)], []).ids) == 299, "a third of the prompt is not worth it"
    others = [[*shared, 1, 2, 3, 4], [*shared, 1, 7], [*shared, 8, 8]]
    assert Prefixes().of([*shared, 1, 2, 3, 5], others).ids == tuple(shared), "most have this much in common"
    assert common([1, 2, 3], [1, 2, 3]) == 2, "the last token is never part of a prefix"
    assert common([1, 2], [3]) == 0


def test_prefixes_that_nothing_uses_are_bounded_in_bytes() -> None:
    prefixes = Prefixes()
    held = [prefixes.of([number, 0, 1], []) for number in range(5)]
    for prefix in held:
        prefix.sizes["prefix"] = 100
    prefixes.trim(0.0)
    assert len(prefixes) == 5, "a running request uses each of them"
    for prefix in held[:4]:
        prefixes.leave(prefix)
    held[3].fetching["rows"] = cast("Delivery", None)
    prefixes.leave(prefixes.of([0, 0, 1], []))
    prefixes.trim(250.0)
    assert [prefix.ids[0] for prefix in prefixes._held.values()] == [2, 3, 4, 0], "least recently used goes"
    assert (prefixes.nbytes, prefixes.claimed) == (400, 200)
    prefixes.trim(0.0)
    assert [prefix.ids[0] for prefix in prefixes._held.values()] == [3, 4], "in use, and on its way"


def test_names_of_prefixes_are_bounded_too() -> None:
    prefixes = Prefixes()
    for number in range(NAMED + 9):
        prefixes.leave(prefixes.of([number, 0, 1], []))
    prefixes.trim(float("inf"))
    assert len(prefixes) == NAMED
