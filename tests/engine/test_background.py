"""Verifies in the background: a slow link holds nobody up, and no token depends on it."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
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
from vericache_core.runtime.background import BackgroundVerify, GiveWay

PROMPTS = [list(range(1, 150)), list(range(3, 80)), [5, 6, 7, 8] * 12, list(range(9, 40))]
PARAMS = SamplingParams(max_new_tokens=40)


@pytest.fixture(scope="module")
def expected() -> list[RequestOutput]:
    with Engine(build("llama"), config=EngineConfig(rows=16)) as engine:
        return engine.generate(PROMPTS, PARAMS, record_logits=True)


@pytest.fixture
def slow_link(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every layer takes 60 ms to come; returns the number of verifies that ran in the background, growing."""
    arrive, start, started = HostStore.arrive, BackgroundVerify.start, [0]

    def slow(self: HostStore, *arguments: Any) -> Any:
        time.sleep(0.06)
        return arrive(self, *arguments)

    def counted(self: BackgroundVerify, *arguments: Any) -> None:
        started[0] += 1
        start(self, *arguments)

    monkeypatch.setattr(HostStore, "arrive", slow)
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


@pytest.mark.parametrize("compressor", ["random", "identity"])
def test_rows_that_the_swap_thread_copies_are_the_same(
    compressor: str, expected: list[RequestOutput], slow_link: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is where the device is no CPU."""
    made = HostStore.__init__

    def elsewhere(self: HostStore, *arguments: Any) -> None:
        made(self, *arguments)
        self.copied = False

    monkeypatch.setattr(HostStore, "__init__", elsewhere)
    with engine(compressor=compressor, full_kv="host") as ours:
        found = ours.generate(PROMPTS, PARAMS, record_logits=True)
    for output, reference in zip(found, expected, strict=True):
        assert_same(output, reference)
    assert slow_link[0]


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
    arrive, broken = HostStore.arrive, [0]

    def breaking(self: HostStore, *arguments: Any) -> Any:
        if slow_link[0] == 2 and not broken[0]:
            broken[0] += 1
            raise SwapError("the link broke")
        return arrive(self, *arguments)

    monkeypatch.setattr(HostStore, "arrive", breaking)
    with engine() as ours:
        found = ours.generate(PROMPTS, PARAMS, record_logits=True)
        ours.loop.ring.check_integrity()
    for output, reference in zip(found, expected, strict=True):
        assert_same(output, reference)
    assert broken[0] == 1
    assert sum(len(output.metrics.degraded) for output in found) == 1


def test_steps_of_several_threads_forget_a_verify_once_and_go_on_without(
    expected: list[RequestOutput], slow_link: list[int]
) -> None:
    with engine() as ours, ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        jobs = [ours.submit(prompt, PARAMS, record_logits=True) for prompt in PROMPTS]
        while not ours.loop.background.busy:
            assert one.submit(ours.step).result()
        while other.submit(ours.step).result() and one.submit(ours.step).result():
            pass
        for job, reference in zip(jobs, expected, strict=True):
            assert_same(job.result(), reference)
        assert ours.loop.background.homeless
        assert slow_link[0] == 1
        ours.loop.ring.check_integrity()


def test_what_a_verify_raises_reaches_whoever_collects_it_and_no_step_of_others() -> None:
    background, load = BackgroundVerify(), Future[None]()

    def run(give_way: GiveWay) -> torch.Tensor:
        give_way(load)
        raise ZeroDivisionError

    segment, closed = segment_of(7)
    background.start(segment, run)
    load.set_result(None)
    background.advance()
    assert background.number == 7
    assert not closed
    with pytest.raises(ZeroDivisionError):
        background.collect(block=False)
    assert not background.busy
    assert closed


def test_stacks_leave_each_others_inference_mode_alone() -> None:
    background, loads, seen = BackgroundVerify(), [Future[None](), Future[None]()], list[bool]()

    def run(give_way: GiveWay) -> torch.Tensor:
        with torch.inference_mode():
            give_way(loads[0])
            seen.append(torch.is_inference_mode_enabled())
            give_way(loads[1])
        return torch.ones(1)

    background.start(segment_of(1)[0], run)
    assert not torch.is_inference_mode_enabled()
    with torch.inference_mode():
        loads[0].set_result(None)
        background.advance()
        assert torch.is_inference_mode_enabled()
    loads[1].set_result(None)
    assert background.collect(block=False) is not None
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
    assert seen == [True]


def test_an_abandoned_verify_is_unwound_at_once() -> None:
    background, left = BackgroundVerify(), list[str]()

    def run(give_way: GiveWay) -> torch.Tensor:
        with torch.inference_mode():
            try:
                give_way(Future())
            finally:
                left.append("unwound")
        raise AssertionError

    segment, closed = segment_of(1)
    background.start(segment, run)
    with torch.inference_mode():
        background.abandon()
        assert torch.is_inference_mode_enabled()
    assert (left, closed) == (["unwound"], ["closed"])
    assert not torch.is_inference_mode_enabled()
    assert not background.busy


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_while_a_verify_is_waited_for_leaves_it_known() -> None:
    """It can be collected later, or ended by whoever lets its request go."""
    background, load = BackgroundVerify(), Future[None]()

    def run(give_way: GiveWay) -> torch.Tensor:
        give_way(load)
        return torch.ones(1)

    background.start(segment_of(7)[0], run)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        background.collect(block=True)
    assert background.number == 7
    load.set_result(None)
    verdict = background.collect(block=True)
    assert verdict is not None
    assert verdict.logits is not None
    assert not background.busy


def segment_of(number: int) -> tuple[Any, list[str]]:
    """A segment of a request of that number, and what is told when its full KV is closed."""
    closed: list[str] = []
    full = SimpleNamespace(close_step=lambda: closed.append("closed"))
    return SimpleNamespace(request=SimpleNamespace(number=number, full=full)), closed
