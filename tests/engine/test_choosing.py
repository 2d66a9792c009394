"""Penalties, processors, sampling and log probabilities see committed tokens only, whatever was drafted."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from tests.drafters import AntiOracle, Drafter, Noisy, Oracle, Scripted, drafting
from tests.models import VOCAB, engine, prompt
from tests.watch import assert_same
from vericache_core.errors import NonFiniteError, VeriCacheError
from vericache_core.runtime.sampling_params import SamplingParams

PROMPT = prompt(19, seed=4)
TOKENS = 36
KINDS = ("oracle", "anti-oracle", "noisy", "scripted", "own")
ALL_PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "no_repeat_ngram": 3,
    "bad_words": ((17,), (4, 5), (300, 301)),
    "min_new_tokens": 10,
}


def drafter(kind: str, tokens: tuple[int, ...]) -> Drafter:
    refs = {tuple(PROMPT): tokens}
    every: dict[str, Drafter] = {
        "oracle": Oracle(refs, VOCAB),
        "anti-oracle": AntiOracle(refs, VOCAB),
        "noisy": Noisy(refs, VOCAB),
        "scripted": Scripted(refs, VOCAB, (0, 1, 8, 3)),
        "own": lambda request, at, own: own,
    }
    return every[kind]


def compare(params: SamplingParams, kind: str, name: str = "llama") -> float:
    ours = engine(name, window=8, compressor="random", keep=0.5)
    (expected,) = ours.generate(PROMPT, params, compressor=None, record_logits=True)
    with drafting(drafter(kind, expected.token_ids)):
        (found,) = ours.generate(PROMPT, params, record_logits=True)
    assert_same(found, expected)
    assert found.metrics.drafted
    return found.metrics.acceptance


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_all_penalties_together(kind: str, name: str) -> None:
    compare(SamplingParams(max_new_tokens=TOKENS, **ALL_PENALTIES), kind, name)


@pytest.mark.parametrize("one", ALL_PENALTIES)
def test_each_penalty_alone(one: str) -> None:
    value = {"bad_words": tuple((token,) for token in range(0, VOCAB, 2))}.get(one, ALL_PENALTIES[one])
    compare(SamplingParams(max_new_tokens=TOKENS, **{one: value}), "scripted")


SAMPLERS = [
    SamplingParams(max_new_tokens=TOKENS, temperature=0.7, seed=5),
    SamplingParams(max_new_tokens=TOKENS, temperature=1.5, top_k=20, top_p=0.9, min_p=0.01, seed=2**63),
    SamplingParams(max_new_tokens=TOKENS, temperature=5.0, repetition_penalty=1.2, logprobs=3),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", SAMPLERS, ids=["temperature", "filters", "penalty"])
def test_sampling_with_a_seed_is_that_of_the_full_cache(kind: str, params: SamplingParams) -> None:
    acceptance = compare(params, kind)
    assert {"oracle": acceptance == 1.0, "anti-oracle": acceptance == 0.0}.get(kind, True)


def test_draft_and_verify_share_the_noise() -> None:
    """With a cache that loses nothing, sampled drafts are accepted like greedy ones."""
    (out,) = engine("llama", window=8).generate(PROMPT, SAMPLERS[1])
    assert out.metrics.acceptance == 1.0
    other = engine("llama").generate(PROMPT, SamplingParams(max_new_tokens=TOKENS, temperature=1.5, seed=6))[0]
    assert other.token_ids != out.token_ids


class Counting:
    """Adds a bonus that depends on how often it was called, and keeps what it was shown."""

    def __init__(self, calls: list[tuple[int, ...]] | None = None) -> None:
        self.calls = [] if calls is None else calls
        self.clones: list[Counting] = []

    def clone(self) -> Counting:
        self.clones.append(Counting())
        return self.clones[-1]

    def __call__(self, prefix: tuple[int, ...], logits: Tensor) -> Tensor:
        self.calls.append(prefix)
        logits[len(self.calls) * 7 % VOCAB] += 3
        return logits


@pytest.mark.parametrize("kind", KINDS)
def test_a_stateful_processor_sees_each_committed_prefix_once(kind: str) -> None:
    processor = Counting()
    compare(SamplingParams(max_new_tokens=TOKENS, logits_processors=(processor,)), kind)
    plain, drafted = processor.clones
    assert plain.calls == drafted.calls
    assert [len(prefix) - len(PROMPT) for prefix in drafted.calls] == list(range(TOKENS))
    assert all(b[:-1] == a for a, b in zip(drafted.calls, drafted.calls[1:], strict=False))


@pytest.mark.parametrize("kind", ["oracle", "noisy"])
def test_a_grammar_is_never_broken_by_drafts(kind: str) -> None:
    """Brackets: after ``(`` three times at most comes ``)``; drafts are illegal everywhere or nowhere."""

    def balanced(prefix: tuple[int, ...], logits: Tensor) -> Tensor:
        depth = sum(1 if token == 1 else -1 for token in prefix[len(PROMPT) :])
        allowed = {1} if depth == 0 else ({2} if depth == 3 else {1, 2})
        masked = logits.new_full(logits.shape, float("-inf"))
        for token in allowed:
            masked[token] = logits[token]
        return masked

    params = SamplingParams(max_new_tokens=TOKENS, logits_processors=(balanced,))
    compare(params, kind)
    with drafting(lambda request, at, own: 3):
        (out,) = engine("llama").generate(PROMPT, params)
    assert set(out.token_ids) <= {1, 2}
    assert out.metrics.accepted == 0


def test_logprobs_are_those_of_the_recorded_logits() -> None:
    params = SamplingParams(max_new_tokens=9, logprobs=2)
    (out,) = engine("llama", compressor="random", keep=0.5).generate(PROMPT, params, record_logits=True)
    assert out.logits is not None
    assert out.logprobs is not None
    for row, entry, token in zip(out.logits.log_softmax(-1), out.logprobs, out.token_ids, strict=True):
        assert entry.token == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-6)
        assert [i for i, _ in entry.top] == row.topk(2).indices.tolist()


@pytest.mark.parametrize("at", [0, 1, 7])
def test_a_processor_that_raises_ends_its_own_request_only(at: int) -> None:
    def bad(prefix: tuple[int, ...], logits: Tensor) -> Tensor:
        if len(prefix) == len(PROMPT) + at:
            raise RuntimeError("boom")
        return logits

    each = [SamplingParams(max_new_tokens=12, logits_processors=(bad,)), SamplingParams(max_new_tokens=12)]
    ours = engine("llama", compressor="random", keep=0.5)
    first, second = ours.generate([PROMPT, PROMPT], each)
    assert first.finish_reason == "error"
    assert isinstance(first.error, VeriCacheError)
    assert "boom" in str(first.error)
    assert second.token_ids == ours.generate(PROMPT, each[1], compressor=None)[0].token_ids
    assert first.token_ids == second.token_ids[:at]
    assert not ours.loop.requests


def test_a_mask_that_leaves_no_token_is_named() -> None:
    params = SamplingParams(max_new_tokens=3, bad_words=tuple((token,) for token in range(VOCAB)))
    (out,) = engine("llama").generate(PROMPT, params)
    assert isinstance(out.error, NonFiniteError)
    assert out.token_ids == ()
