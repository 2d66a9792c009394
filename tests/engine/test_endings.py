"""Ends of a request are decided token by token: EOS wherever it falls in a block, limits, minimum lengths."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.drafters import AntiOracle, Drafter, Noisy, Oracle, References, Scripted, drafting
from tests.models import VOCAB, build, engine, engine_over, prompt
from tests.watch import assert_same
from vericache_core.engine import Engine
from vericache_core.runtime.sampling_params import SamplingParams

PROMPT = prompt(11, seed=3)
TOKENS = 24


@functools.cache
def free_run() -> tuple[int, ...]:
    """What the model says when nothing ends it; nearly all different, so each can play EOS."""
    (out,) = engine("gpt2").generate(PROMPT, SamplingParams(max_new_tokens=TOKENS), compressor=None)
    assert len(set(out.token_ids)) > TOKENS - 4
    return out.token_ids


def references() -> References:
    return {tuple(PROMPT): free_run()}


def ending_with(*eos: int, **settings: Any) -> Engine:
    loaded = build("gpt2")
    loaded.generation_config.eos_token_id = list(eos) if len(eos) > 1 else eos[0]
    return engine_over(loaded, window=7, **settings)


def drafters() -> dict[str, Drafter]:
    refs = references()
    return {
        "oracle": Oracle(refs, VOCAB),
        "anti-oracle": AntiOracle(refs, VOCAB),
        "noisy": Noisy(refs, VOCAB),
        "scripted": Scripted(refs, VOCAB, (7, 2, 0, 5)),
    }


@pytest.mark.parametrize("kind", ["oracle", "anti-oracle", "noisy", "scripted"])
def test_eos_ends_the_output_wherever_it_falls_in_a_block(kind: str) -> None:
    """First token, drafted, bonus: position j runs through all of them."""
    for j, eos in list(enumerate(free_run()))[:: 1 if kind in {"oracle", "scripted"} else 4]:
        expected = free_run()[: free_run().index(eos) + 1]
        with drafting(drafters()[kind]):
            (out,) = ending_with(eos).generate(PROMPT, SamplingParams(max_new_tokens=TOKENS))
        assert out.error is None
        assert out.token_ids == expected, f"EOS at {j}"
        assert (out.finish_reason, out.stop_reason) == ("stop", eos)


def test_of_two_eos_ids_the_first_that_is_committed_counts() -> None:
    early, late = free_run()[6], free_run()[15]
    for pair in ((early, late), (late, early)):
        with drafting(drafters()["oracle"]):
            (out,) = ending_with(*pair).generate(PROMPT, SamplingParams(max_new_tokens=TOKENS))
        assert out.token_ids == free_run()[:7]
        assert out.stop_reason == early


def test_eos_that_is_drafted_but_rejected_ends_nothing() -> None:
    eos = next(token for token in range(VOCAB) if token not in free_run())
    for at in range(10):
        with drafting(lambda request, i, own, at=at: eos if i == at else free_run()[i]):  # type: ignore[misc]
            (out,) = ending_with(eos).generate(PROMPT, SamplingParams(max_new_tokens=TOKENS))
        assert out.token_ids == free_run()
        assert out.finish_reason == "length"


def test_eos_may_be_the_pad_id_and_stand_in_the_prompt() -> None:
    """Steps are padded with token 0; an EOS of 0 in the padding or the prompt must end nothing."""
    ids = [0, 5, 0, 9, 0]
    with_eos = ending_with(0)
    with_eos.adapter.model.config.pad_token_id = 0
    (plain,) = engine("gpt2").generate(ids, SamplingParams(max_new_tokens=TOKENS), compressor=None)
    (out,) = with_eos.generate(ids, SamplingParams(max_new_tokens=TOKENS))
    cut = plain.token_ids.index(0) + 1 if 0 in plain.token_ids else TOKENS
    assert out.token_ids == plain.token_ids[:cut]


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 8, 9, 15, 16, 17])
@pytest.mark.parametrize("kind", ["oracle", "scripted"])
def test_the_length_limit_is_exact(limit: int, kind: str) -> None:
    with drafting(drafters()[kind]):
        (out,) = ending_with(VOCAB - 1).generate(PROMPT, SamplingParams(max_new_tokens=limit), record_logits=True)
    assert out.token_ids == free_run()[:limit]
    assert out.finish_reason == "length"
    assert out.metrics.new_tokens == limit
    assert out.logits is not None
    assert out.logits.shape == (limit, VOCAB)


def test_min_new_tokens_holds_eos_back_in_drafts_and_verifies_alike() -> None:
    eos = free_run()[3]
    for least in (0, 4, 5, 12):
        params = SamplingParams(max_new_tokens=TOKENS, min_new_tokens=least)
        (expected,) = ending_with(eos).generate(PROMPT, params, compressor=None, record_logits=True)
        (found,) = ending_with(eos).generate(PROMPT, params, record_logits=True)
        assert_same(found, expected)
        assert len(found.token_ids) >= least
        assert found.metrics.acceptance == 1.0 or found.metrics.drafted == 0
        scripted = Scripted({tuple(PROMPT): expected.token_ids}, VOCAB, (0, 3, 7))
        for drafter in (drafters()["anti-oracle"], scripted):
            with drafting(drafter):
                (again,) = ending_with(eos).generate(PROMPT, params, record_logits=True)
            assert_same(again, expected)


def test_a_prompt_that_fills_the_model_takes_exactly_what_fits() -> None:
    from vericache_core.errors import PromptError

    ours = engine_over(build("gpt2", n_positions=40))
    (out,) = ours.generate(prompt(33), SamplingParams(max_new_tokens=7))
    (plain,) = ours.generate(prompt(33), SamplingParams(max_new_tokens=7), compressor=None)
    assert out.token_ids == plain.token_ids
    assert len(out.token_ids) == 7
    with pytest.raises(PromptError, match="fits"):
        ours.generate(prompt(33), SamplingParams(max_new_tokens=8))
    with pytest.raises(PromptError, match="takes 40"):
        ours.generate(prompt(41), SamplingParams(max_new_tokens=0))
