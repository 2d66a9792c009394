"""Loads that would take hours on a slow link end as soon as nobody wants them, and leave nothing behind."""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np
import pytest
import torch

from tests.models import build
from tests.sdk.making import descriptor
from vericache_core import Engine, EngineConfig, SamplingParams
from vericache_core.cache.full import FullKV
from vericache_core.cache.link import Link
from vericache_core.cache.ring import SwapRing
from vericache_core.errors import SwapError

CPU = torch.device("cpu")
PATIENCE = 60.0
"""Seconds after which a thread counts as one that hangs; the loads here would take hours."""


class Gate:
    """A link's ``sleep`` that tells when a load waits in it."""

    def __init__(self) -> None:
        self.entered = threading.Event()

    def sleep(self, stop: threading.Event, seconds: float) -> None:
        self.entered.set()
        stop.wait(seconds)


def ends(action: Any) -> None:
    """Run ``action`` on a thread; it has to come back."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "it hangs"


def written(tier: str, ring: SwapRing, rows: int = 200, layers: int = 3) -> FullKV:
    made = [descriptor(index) for index in range(layers)]
    full = FullKV(made, CPU, tier, (), ring)
    full.open(rows)
    for layer in made:
        keys = torch.zeros(layer.kv_heads, rows, layer.head_dim, dtype=layer.dtype)
        values = torch.zeros(layer.kv_heads, rows, layer.value_dim, dtype=layer.dtype)
        full.pages(layer.index).write(np.zeros(layer.kv_heads, dtype=np.int64), keys, values)
        full.wrote(layer.index, rows)
    full.close_step()
    full.advance(rows)
    return full


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_step_that_ends_early_stops_its_loads_and_the_next_one_loads_again(tier: str) -> None:
    gate = Gate()
    link = Link(1.0, sleep=gate.sleep)
    ring = SwapRing(2, CPU, link)
    full = written(tier, ring)
    full.open(1)
    assert gate.entered.wait(PATIENCE)
    ends(full.close_step)
    assert not ring._busy
    link.bytes_per_s = None
    full.open(1)
    full.pages(0)
    ends(full.close)
    ends(ring.close)
    assert ring.nbytes == 0


def test_the_link_is_free_again_after_a_load_that_was_stopped() -> None:
    gate, stop = Gate(), threading.Event()
    link = Link(1.0, lambda: 5.0, gate.sleep)
    stop.set()
    with pytest.raises(SwapError, match="stopped"):
        link.hold(5.0, 1000, stop)
    link.hold(5.0, 0, threading.Event())
    assert link._free_at == 5.0


def test_abort_wakes_a_step_that_waits_and_also_one_that_opens_later() -> None:
    gate = Gate()
    ring = SwapRing(2, CPU, Link(1.0, sleep=gate.sleep))
    full = written("host", ring)
    full.open(1)
    failed = threading.Event()

    def wait() -> None:
        with pytest.raises(SwapError, match="stopped"):
            full.pages(0)
        failed.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert gate.entered.wait(PATIENCE)
    with full.aborted():
        assert failed.wait(PATIENCE)
        full.open(1)
        with pytest.raises(SwapError, match="stopped"):
            full.pages(0)
    full.close()
    ring.close()


def test_what_was_unwanted_before_stays_so_after_a_block_that_aborts() -> None:
    ring = SwapRing(2, CPU)
    full = written("host", ring)
    seen = []
    with full.aborted():
        seen.append(full.unwanted)
    seen.append(full.unwanted)
    full.open(1)
    full.pages(0)
    full.close_step()
    full.abort()
    with full.aborted():
        seen.append(full.unwanted)
    seen.append(full.unwanted)
    assert seen == [True, False, True, True]
    full.open(1)
    with pytest.raises(SwapError, match="stopped"):
        full.pages(0)
    full.close()
    ring.close()


def test_an_abort_for_good_from_another_thread_outlives_a_block_that_it_came_in() -> None:
    ring = SwapRing(2, CPU)
    full = written("host", ring)
    with full.aborted():
        ends(full.abort)
    assert full.unwanted
    full.open(1)
    with pytest.raises(SwapError, match="stopped"):
        full.pages(0)
    full.close()
    ring.close()


def test_blocks_of_two_threads_that_overlap_end_with_the_last_of_them() -> None:
    ring = SwapRing(2, CPU)
    full = written("host", ring)
    first, second, seen = full.aborted(), full.aborted(), list[bool]()
    ends(first.__enter__)
    ends(second.__enter__)
    for block in (first, second):
        ends(functools.partial(block.__exit__, None, None, None))
        seen.append(full.unwanted)
    assert seen == [True, False]
    full.open(1)
    full.pages(0)
    full.close()
    ring.close()


@pytest.mark.parametrize(("tier", "when"), [("host", "waiting"), ("disk", "waiting"), ("disk", "copying")])
def test_a_load_that_was_stopped_counts_neither_bytes_nor_time(tier: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    link = Link(1.0, sleep=gate.sleep)
    ring = SwapRing(2, CPU, link)
    full = written(tier, ring)
    counted = full.moved_bytes, full.link_bytes, full.link_seconds
    if when == "copying":  # stopped between two pages

        def stopped(source: Any, *arguments: Any) -> Any:
            gate.entered.set()
            arguments[-1].wait(PATIENCE)
            return real(source, *arguments)

        store: Any = type(full._store)
        real = store.fetch
        monkeypatch.setattr(store, "fetch", stopped)
    full.open(1)
    assert gate.entered.wait(PATIENCE)
    full.close_step()
    assert (full.moved_bytes, full.link_bytes, full.link_seconds) == counted
    assert not full.loads
    monkeypatch.undo()
    link.bytes_per_s = None
    full.open(1)
    for layer in full.offloaded:
        full.pages(layer)
        full.wrote(layer, 1)
    assert full.link_bytes == full.moved_bytes > 0
    assert full.link_seconds > counted[2]
    assert [layer for layer, _, _ in full.loads] == list(full.offloaded)
    full.close()
    ring.close()


@pytest.mark.parametrize("how", ["cancel", "close"])
@pytest.mark.parametrize("scheduler", ["lockstep", "staggered"])
def test_a_request_whose_swap_is_in_flight_can_be_let_go(how: str, scheduler: Any) -> None:
    gate = Gate()
    config = EngineConfig(rows=16, compressor="random", keep=0.5, window=4, full_kv="host", probe=False, scheduler=scheduler)
    engine = Engine(build("llama"), config=config)
    try:
        link = engine.loop.ring.link
        link._sleep, link.bytes_per_s = gate.sleep, 1.0
        job = engine.submit(list(range(1, 100)), SamplingParams(max_new_tokens=40))

        def run() -> None:
            while not job.finished and engine.step():
                pass

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        assert gate.entered.wait(PATIENCE)
        ends(job.cancel if how == "cancel" else engine.close)
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert job.result().finish_reason == "cancelled"
        assert not job.result().metrics.degraded
        assert engine.loop.ring.nbytes == 0
    finally:
        ends(engine.close)
    assert not [one for one in threading.enumerate() if one.name.startswith(("vericache-swap", "vericache-verify"))]
