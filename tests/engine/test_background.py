"""Verifies in the background: a slow link holds nobody up, and no token depends on it."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.models import build
from tests.watch import assert_same, watching
from vericache_core import Engine, EngineConfig, SamplingParams
from vericache_core.cache.tiers import HostStore
from vericache_core.errors import SwapError
from vericache_core.model.adapter import ModelAdapter
from vericache_core.outputs import RequestOutput
from vericache_core.runtime.background import BackgroundVerify

PROMPTS = [list(range(1, 150)), list(range(3, 80)), [5, 6, 7, 8] * 12, list(range(9, 40))]
PARAMS = SamplingParams(max_new_tokens=40)


@pytest.fixture(scope="module")
def expected() -> list[RequestOutput]:
    with Engine(build("llama"), config=EngineConfig(rows=16)) as engine:
        return engine.generate(PROMPTS, PARAMS, record_logits=True)


@pytest.fixture
def slow_link(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every layer takes 60 ms to come; returns the number of verifies that ran in the background, growing."""
    read, start, started = HostStore.read, BackgroundVerify.start, [0]

    def slow(self: HostStore, *arguments: Any) -> Any:
        time.sleep(0.06)
        return read(self, *arguments)

    def counted(self: BackgroundVerify, *arguments: Any) -> None:
        started[0] += 1
        start(self, *arguments)

    monkeypatch.setattr(HostStore, "read", slow)
    monkeypatch.setattr(BackgroundVerify, "start", counted)
    return started


def engine(**changes: Any) -> Engine:
    return Engine(build("llama"), config=EngineConfig(**{"rows": 16, "compressor": "random", "window": 5, **changes}))


@pytest.mark.parametrize("scheduler", ["staggered", "lockstep"])
def test_slow_swaps_hide_behind_drafts_and_change_nothing(
    scheduler: str, expected: list[RequestOutput], slow_link: list[int]
) -> None:
    with engine(scheduler=scheduler) as ours, watching(ours):
        ours.loop.batcher._steps_without_swap.append(60.0)  # as if a kernel had been compiled in it
        found = ours.generate(PROMPTS, PARAMS, record_logits=True)
        assert ours.loop.swap_seconds > 0
        assert not ours.loop.scheduler.running
    for output, reference in zip(found, expected, strict=True):
        assert_same(output, reference)
    assert (slow_link[0] > 0) == (scheduler == "staggered")  # in lock step nobody drafts on meanwhile
    assert sum(output.metrics.swap_seconds for output in found) > 0


def test_a_fast_link_needs_no_background(expected: list[RequestOutput], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BackgroundVerify, "start", lambda *_: pytest.fail("nothing here takes longer than a step"))
    step = ModelAdapter.step

    def slow(self: ModelAdapter, *arguments: Any, **options: Any) -> Any:
        time.sleep(0.03)  # far above the link's time even on a loaded machine
        return step(self, *arguments, **options)

    monkeypatch.setattr(ModelAdapter, "step", slow)
    with engine() as ours:
        found = ours.generate(PROMPTS, SamplingParams(max_new_tokens=12), record_logits=True)
    for output, reference in zip(found, expected, strict=True):
        assert output.token_ids == reference.token_ids[:12]


def test_cancelling_a_request_in_flight_leaves_the_others_alone(expected: list[RequestOutput], slow_link: list[int]) -> None:
    with engine() as ours:
        jobs = [ours.submit(prompt, PARAMS, record_logits=True) for prompt in PROMPTS]
        while not ours.loop.background.busy:
            assert ours.step()
        flying = next(i for i, job in enumerate(jobs) if job.number == ours.loop.background.number)
        jobs[flying].cancel()
        assert ours.loop.background.collect(block=True) is None
        while ours.step():
            pass
        for i, job in enumerate(jobs):
            if i != flying:
                assert_same(job.result(), expected[i])
        ours.loop.ring.check_integrity()
    assert jobs[flying].token_ids == expected[flying].token_ids[: len(jobs[flying].token_ids)]


def test_a_swap_that_fails_in_flight_is_recomputed(
    expected: list[RequestOutput], slow_link: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, broken = HostStore.read, [0]

    def breaking(self: HostStore, *arguments: Any) -> Any:
        if slow_link[0] == 2 and not broken[0]:
            broken[0] += 1
            raise SwapError("the link broke")
        return read(self, *arguments)

    monkeypatch.setattr(HostStore, "read", breaking)
    with engine() as ours:
        found = ours.generate(PROMPTS, PARAMS, record_logits=True)
        ours.loop.ring.check_integrity()
    for output, reference in zip(found, expected, strict=True):
        assert_same(output, reference)
    assert broken[0] == 1
    assert sum(len(output.metrics.degraded) for output in found) == 1


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_while_a_verify_is_waited_for_leaves_it_known() -> None:
    """Whoever lets its request go then has to stop its loads, and to wait for the thread that computes with them."""
    background, done = BackgroundVerify(), threading.Event()
    segment: Any = SimpleNamespace(request=SimpleNamespace(number=7))
    background.start(segment, lambda: torch.full((1,), float(done.wait(60))))
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        background.collect(block=True)
    assert background.number == 7
    done.set()
    background.close()
    assert not background.busy
