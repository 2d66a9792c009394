"""Arrivals, budgets, preemption, cancellation, windows, modes and proposers: none of them may change a token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import build
from tests.watch import assert_same
from vericache_core import Engine, EngineConfig, SamplingParams
from vericache_core.errors import ConfigError
from vericache_core.outputs import RequestOutput
from vericache_core.runtime.admission import QueueFull
from vericache_core.runtime.schedulable import StepPlan

PROMPTS = [list(range(1, 150)), list(range(3, 80)), [5, 6, 7, 8] * 12, list(range(9, 40))]
PARAMS = SamplingParams(max_new_tokens=30)


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


@pytest.fixture(scope="module")
def expected(model: Any) -> list[RequestOutput]:
    with Engine(model, config=EngineConfig(rows=16)) as engine:
        return engine.generate(PROMPTS, PARAMS, record_logits=True)


def engine(model: Any, **changes: Any) -> Engine:
    return Engine(model, config=EngineConfig(**{"rows": 16, "compressor": "random", "keep": 0.5, "window": 5, **changes}))


def assert_all_same(found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("scheduler", ["staggered", "lockstep"])
@pytest.mark.parametrize("mode", ["plain", "pinned", "offloaded", "auto"])
@pytest.mark.parametrize("window", [3, "auto"])
def test_schedulers_modes_and_windows(
    model: Any, expected: list[RequestOutput], scheduler: str, mode: str, window: int | str
) -> None:
    with engine(model, scheduler=scheduler, mode=mode, window=window) as ours:
        found = ours.generate(PROMPTS, PARAMS, record_logits=True)
    assert_all_same(found, expected)
    if mode in ("pinned", "offloaded"):
        assert {output.metrics.mode for output in found} == {mode}
    if mode == "pinned":
        assert not any(output.metrics.swap_bytes for output in found)
    if window == "auto" and mode in ("pinned", "offloaded"):
        assert all(output.metrics.windows for output in found)


@pytest.mark.parametrize("compressor", [None, "random", "identity"])
@pytest.mark.parametrize("window", [1, 4, 20])
def test_a_proposer_changes_speed_only(model: Any, expected: list[RequestOutput], compressor: str | None, window: int) -> None:
    with engine(model, compressor=compressor, keep=None, proposer="ngram", window=window) as ours:
        found = ours.generate(PROMPTS, PARAMS, record_logits=True)
    assert_all_same(found, expected)
    if window > 1 or compressor is None:
        assert sum(output.metrics.proposed for output in found) > 0


@pytest.mark.parametrize("mode", ["plain", "pinned", "offloaded", "auto"])
def test_proposals_chosen_by_cost_change_speed_only(model: Any, expected: list[RequestOutput], mode: str) -> None:
    with engine(model, proposer="ngram", window="auto", mode=mode) as ours:
        found = ours.generate(PROMPTS, PARAMS, record_logits=True)
        again = ours.generate(PROMPTS, PARAMS, record_logits=True)  # with what was learnt of proposals
    assert_all_same(found, expected)
    assert_all_same(again, expected)


def test_proposals_to_the_full_kv_stop_where_they_do_not_pay(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are dear and every proposal is wrong: after a while nobody asks any more."""
    from vericache_core.runtime import planning
    from vericache_core.runtime.costs import CostModel
    from vericache_core.runtime.propose import NGramProposer
    from vericache_core.runtime.rounds import RoundPricer

    costs = CostModel({1: 1e-3, 128: 128e-3}, read=0.0, pair=1e-3)
    monkeypatch.setattr(planning.Planner, "pricer", property(lambda self: RoundPricer(costs)))
    monkeypatch.setattr(NGramProposer, "look_up", lambda self, tokens, drafts, most: [(tokens[-1] + 1) % 90] * most)
    monkeypatch.setattr(NGramProposer, "replay", lambda self, tokens, start, most: [(most, 0)] * (len(tokens) - start))
    with engine(model, compressor=None, proposer="ngram", window="auto") as ours:
        first, second = (ours.generate(PROMPTS[:1], PARAMS)[0].metrics.proposed for _ in range(2))
    assert second == 0
    assert first <= 64


def test_proposals_that_the_drafter_agrees_with_save_steps(model: Any, expected: list[RequestOutput]) -> None:
    """The whole answer stands in the prompt already, so everything proposed is right."""
    prompt = [*PROMPTS[3], *expected[3].token_ids, *PROMPTS[3]]
    steps = []
    for proposer in ("none", "ngram"):
        with engine(model, compressor="identity", keep=None, proposer=proposer, window=20) as ours:
            (reference,) = ours.generate([prompt], PARAMS, compressor=None, record_logits=True)
            before = ours.loop.steps
            (found,) = ours.generate([[*prompt, *reference.token_ids, *prompt]], PARAMS, record_logits=True)
            (plain,) = ours.generate([[*prompt, *reference.token_ids, *prompt]], PARAMS, compressor=None, record_logits=True)
            assert_same(found, plain)
            steps.append((ours.loop.steps - before, found.metrics.proposals_kept))
    assert steps[0][1] == 0
    assert steps[1][1] > 0
    assert steps[1][0] < steps[0][0]


def test_requests_arrive_while_others_run_and_leave_when_they_like(model: Any, expected: list[RequestOutput]) -> None:
    draw = random.Random(3)
    with engine(model) as ours:
        jobs: list[tuple[int, Any]] = []
        cancelled = []
        for turn in range(12):
            which = turn % len(PROMPTS)
            jobs.append((which, ours.submit(PROMPTS[which], PARAMS, record_logits=True)))
            for _ in range(draw.randrange(1, 25)):
                ours.step()
            if turn % 4 == 3:
                victim = jobs[draw.randrange(len(jobs))]
                if not victim[1].finished:
                    seen = victim[1].token_ids
                    victim[1].cancel()
                    cancelled.append(victim)
                    assert victim[1].result().finish_reason == "cancelled"
                    assert victim[1].token_ids == seen
        while ours.step():
            pass
        for job in jobs:
            output = job[1].result()
            if job in cancelled:
                assert output.token_ids == expected[job[0]].token_ids[: len(output.token_ids)]
            else:
                assert_same(output, expected[job[0]])
        assert not ours.loop.requests
        assert not ours.loop.scheduler.running
        assert not ours.loop.scheduler.waiting
    assert cancelled


def test_a_device_budget_is_obeyed_and_requests_wait_for_it(model: Any, expected: list[RequestOutput]) -> None:
    with engine(model) as free:
        free.generate(PROMPTS, PARAMS)
        unbounded = free.loop.peak_device_kv_bytes
        requests = [free.builder.for_prompt(prompt, PARAMS, "random") for prompt in PROMPTS]
        alone = max(free.planner.holds(request).device + free.loop.batcher.transient(request) for request in requests)
    budget = int(alone * 1.1)
    assert budget < unbounded
    with engine(model, device_budget=budget) as ours:
        found = ours.generate(PROMPTS, PARAMS, record_logits=True)
        assert_all_same(found, expected)
        assert ours.loop.peak_device_kv_bytes <= budget


def test_a_budget_that_no_request_fits_into_is_one_clear_error(model: Any) -> None:
    with engine(model, device_budget=1000) as ours, pytest.raises(ConfigError, match="device budget is too small"):
        ours.generate(PROMPTS, PARAMS)


def test_a_full_queue_refuses_politely_and_nothing_is_lost(model: Any, expected: list[RequestOutput]) -> None:
    with engine(model, max_running=1, max_queue=2) as ours:
        jobs = [ours.submit(PROMPTS[0], PARAMS, record_logits=True)]
        ours.step()
        jobs += [ours.submit(PROMPTS[i], PARAMS, record_logits=True) for i in (1, 2)]
        with pytest.raises(QueueFull):
            ours.submit(PROMPTS[3], PARAMS)
        while ours.step():
            pass
        assert_all_same([job.result() for job in jobs], expected[:3])
        assert_all_same(ours.generate(PROMPTS, PARAMS, record_logits=True), expected)  # more than the queue holds


@pytest.mark.parametrize("compressor", [None, "random"])
def test_preemption_costs_time_and_no_bit(model: Any, expected: list[RequestOutput], compressor: str | None) -> None:
    with engine(model, compressor=compressor, keep=None, max_running=1) as ours:
        low = ours.submit(PROMPTS[0], PARAMS, record_logits=True)
        while len(low.token_ids) < 7:
            ours.step()
        high = ours.submit(PROMPTS[1], PARAMS, priority=5, record_logits=True)
        assert_same(high.result(), expected[1])
        assert not low.finished
        assert_same(low.result(), expected[0])
        assert low.result().metrics.preemptions == 1


def test_a_calibration_of_another_model_is_refused(model: Any, tmp_path: Path) -> None:
    from vericache_core.runtime.calibration import Calibration
    from vericache_core.runtime.measure import fingerprint

    with engine(model, mode="auto", window="auto") as ours:
        made = Calibration(fingerprint(ours.adapter), ours.planner.pricer.costs)
    made.save(tmp_path / "own.json")
    with engine(model, mode="auto", window="auto", calibration=str(tmp_path / "own.json")) as again:
        assert again.planner.pricer.costs == made.costs
    with pytest.raises(ConfigError, match="another machine or model"):
        engine(build("llama", torch.bfloat16), window="auto", calibration=str(tmp_path / "own.json"))


def test_a_scheduler_that_finds_nothing_to_run_ends_in_an_error(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine(model) as ours:
        monkeypatch.setattr(ours.loop.scheduler, "plan", lambda _now: StepPlan())
        (output,) = ours.generate(PROMPTS[3], PARAMS)
    assert output.finish_reason == "error"
    assert "nothing to run" in str(output.error)
