"""Degenerate budgets and prompts: output is right, something is always kept, and compression really compresses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models import build, engine, engine_over, prompt
from tests.watch import assert_same, watching
from vericache_core.runtime.sampling_params import SamplingParams


@pytest.mark.parametrize("budget", [{"keep": 0.001}, {"keep": 0.5}, {"keep": 1.0}, {"keep_tokens": 1}, {"keep_tokens": 500}])
def test_any_budget_on_prompts_of_any_length(budget: dict[str, Any]) -> None:
    ours = engine("llama", compressor="random", full_kv="host", **budget)
    prompts = [prompt(length, seed=length) for length in (1, 2, 3, 15, 16, 17, 32, 70)]
    params = SamplingParams(max_new_tokens=10)
    expected = ours.generate(prompts, params, compressor=None, record_logits=True)
    with watching(ours):
        found = ours.generate(prompts, params, record_logits=True)
    for mine, theirs in zip(found, expected, strict=True):
        assert_same(mine, theirs)
        assert not mine.metrics.degraded
        if budget in ({"keep": 1.0}, {"keep_tokens": 500}):
            assert mine.metrics.acceptance == 1.0


def test_generation_of_several_times_the_budget() -> None:
    ours = engine("gpt2", compressor="random", keep_tokens=8, fold=16)
    params = SamplingParams(max_new_tokens=60)
    (expected,) = ours.generate(prompt(20), params, compressor=None, record_logits=True)
    (found,) = ours.generate(prompt(20), params, record_logits=True)
    assert_same(found, expected)


@pytest.mark.parametrize(("compressor", "share"), [("random", 0.3), ("adversarial", 0.2)])
def test_the_compressed_bytes_are_measured_and_small(compressor: str, share: float) -> None:
    settings: dict[str, Any] = {"keep": 0.25} if compressor == "random" else {}
    (out,) = engine("llama", compressor=compressor, **settings).generate(prompt(400), SamplingParams(max_new_tokens=4))
    assert out.metrics.compressed_from_bytes == 400 * 3 * 2 * (16 + 16) * 4
    assert 0 < out.metrics.compressed_kv_bytes <= share * out.metrics.compressed_from_bytes


def test_an_adversarial_cache_changes_nothing_but_speed() -> None:
    ours = engine("gpt2", compressor="adversarial", full_kv="disk", fold=8)
    params = SamplingParams(max_new_tokens=40)
    (expected,) = ours.generate(prompt(50), params, compressor=None, record_logits=True)
    (found,) = ours.generate(prompt(50), params, record_logits=True)
    assert_same(found, expected)
    assert found.metrics.acceptance < 0.2


@pytest.mark.parametrize("bias", [50.0, 200.0])
def test_outlier_key_channels(bias: float) -> None:
    """Keys with two channels far from zero spoil quantizers; the output must not notice."""
    loaded = build("qwen2")
    with torch.no_grad():
        for layer in loaded.model.layers:
            layer.self_attn.k_proj.bias[:2] = bias
    ours = engine_over(loaded, compressor="adversarial", full_kv="host")
    params = SamplingParams(max_new_tokens=20)
    (expected,) = ours.generate(prompt(30), params, compressor=None, record_logits=True)
    (found,) = ours.generate(prompt(30), params, record_logits=True)
    assert_same(found, expected)


def test_questions_over_one_context_leave_no_residue() -> None:
    """q1, q2, q1: the first and the third answer are the same."""
    ours, context = engine("gpt2", compressor="random", keep=0.5, full_kv="host"), prompt(60)
    params = SamplingParams(max_new_tokens=12)
    first, second, third = (
        ours.generate([*context, *prompt(5, seed=seed)], params, record_logits=True)[0] for seed in (1, 2, 1)
    )
    assert_same(first, third)
    assert first.logits is not None
    assert second.logits is not None
    assert not torch.equal(first.logits, second.logits)
