"""The limit of the link, on a clock that only moves when somebody sleeps or works."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.models import build
from tests.sdk.making import descriptor
from tests.watch import assert_same
from vericache_core import Engine, EngineConfig, SamplingParams
from vericache_core.cache.full import FullKV
from vericache_core.cache.link import Link
from vericache_core.cache.ring import SwapRing
from vericache_core.errors import ConfigError
from vericache_core.runtime.calibration import Calibration
from vericache_core.runtime.costs import CostModel
from vericache_core.runtime.costs import Link as LinkCost
from vericache_core.runtime.measure import fingerprint

CPU = torch.device("cpu")


class Hands:
    """A clock, moved by hand."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, list[float]()

    def clock(self) -> float:
        return self.now

    def sleep(self, _: threading.Event, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_a_transfer_takes_its_bytes_at_the_rate_and_its_own_time_counts() -> None:
    hands = Hands()
    link = Link(100.0, hands.clock, hands.sleep)
    started = link.now()
    hands.now += 3.0  # the copying itself
    link.hold(started, 500, threading.Event())
    assert hands.now == pytest.approx(5.0)
    started = link.now()
    hands.now += 7.0  # slower than the limit anyway
    link.hold(started, 500, threading.Event())
    assert hands.now == pytest.approx(12.0)
    assert hands.slept == pytest.approx([2.0])


def test_transfers_that_overlap_share_the_rate_and_idle_time_is_not_saved_up() -> None:
    hands = Hands()
    link = Link(100.0, hands.clock, hands.sleep)
    first, second = link.now(), link.now()
    link.hold(first, 100, threading.Event())
    link.hold(second, 100, threading.Event())
    assert hands.now == pytest.approx(2.0)
    hands.now = 50.0
    link.hold(link.now(), 100, threading.Event())
    assert hands.now == pytest.approx(51.0)


def test_without_a_limit_nobody_waits() -> None:
    hands = Hands()
    Link(None, hands.clock, hands.sleep).hold(0.0, 10**12, threading.Event())
    assert not hands.slept


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_comes_back_from_a_tier_is_held_back_and_what_goes_there_is_not(tier: str) -> None:
    hands, layer, rows = Hands(), descriptor(), 200
    link = Link(1e3, hands.clock, hands.sleep)
    ring = SwapRing(2, CPU, link)
    caches = [FullKV([layer], CPU, tier, (), ring) for _ in range(2)]
    for full in caches:
        full.open(rows)
        keys = torch.zeros(layer.kv_heads, rows, layer.head_dim, dtype=layer.dtype)
        values = torch.zeros(layer.kv_heads, rows, layer.value_dim, dtype=layer.dtype)
        full.pages(0).write(np.zeros(layer.kv_heads, dtype=np.int64), keys, values)
        full.wrote(0, rows)
        full.close_step()
        full.advance(rows)
    assert hands.now == 0.0
    for full in caches:
        full.open(1)
        full.pages(0)
        full.close_step()
        full.read(0, 0, 10)
    moved = sum(full.moved_bytes for full in caches)
    assert moved > 2 * rows * layer.token_bytes
    assert hands.now == pytest.approx(moved / 1e3)
    for full in caches:
        full.close()
    ring.close()


def test_an_engine_holds_all_its_requests_back_together_and_changes_no_bit() -> None:
    prompts, params = [list(range(1, 150)), list(range(3, 80))], SamplingParams(max_new_tokens=12)
    model, hands = build("llama"), Hands()
    config = EngineConfig(rows=16, compressor="random", keep=0.5, window=4, probe=False, scheduler="lockstep")
    with Engine(model, config=config) as free:
        expected = free.generate(prompts, params, compressor=None, record_logits=True)
    from vericache_core.config import replace

    with Engine(model, config=replace(config, link_bytes_per_s=1e6)) as ours:
        link = ours.loop.ring.link
        link._clock, link._sleep = hands.clock, hands.sleep
        found = ours.generate(prompts, params, record_logits=True)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
    assert hands.now == pytest.approx(sum(output.metrics.swap_bytes for output in found) / 1e6)
    assert hands.now > 0


def test_costs_know_of_the_limit_and_only_of_one_that_is_slower() -> None:
    costs = CostModel({8: 0.1}, 1e-10, 1e-8, {"host": LinkCost(0.1, 1e-9), "disk": LinkCost(0.2, 1e-6)}, 30)
    assert costs.limited(None) == costs
    limited = costs.limited(1e8)
    assert limited.links == {"host": LinkCost(0.1, 1e-8), "disk": LinkCost(0.2, 1e-6)}
    assert limited.shapes == costs.shapes


def test_a_calibration_with_a_limit_is_for_engines_with_one(tmp_path: Path) -> None:
    model, file = build("llama"), str(tmp_path / "made.json")
    base: dict[str, Any] = {"rows": 16, "compressor": "random", "keep": 0.5, "window": "auto", "probe": False}
    with Engine(model, config=EngineConfig(**base, link_bytes_per_s=1e3)) as ours:
        costs = ours.planner.pricer.costs
        print_of = fingerprint(ours.adapter)
    assert all(link.seconds_per_byte >= 1e-3 for link in costs.links.values())
    Calibration(print_of, costs, {}, 1e3).save(file)
    for limit in (1e3, 500.0):
        with Engine(model, config=EngineConfig(**base, link_bytes_per_s=limit, calibration=file)) as ours:
            assert all(link.seconds_per_byte >= 1 / limit for link in ours.planner.pricer.costs.links.values())
    for wider in (None, 2e3):
        with pytest.raises(ConfigError, match="was measured with link_bytes_per_s=1000"):
            Engine(model, config=EngineConfig(**base, link_bytes_per_s=wider, calibration=file))
