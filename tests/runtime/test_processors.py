"""Built-in processors against the implementations of transformers, and their purity."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from vericache_core.errors import ConfigError
from vericache_core.runtime.processors import TokenHistory, bad_word_ids, built_in_processors, filter_logits
from vericache_core.runtime.sampling_params import SamplingParams

VOCAB = 24
EOS = (3, 7)
ids = st.lists(st.integers(0, VOCAB - 1), max_size=20)
prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)
words = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3).map(tuple), max_size=4).map(tuple)
seeds = st.integers(0, 10_000)


def random_logits(seed: int, vocab: int = VOCAB) -> Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * 3


def ours(params: SamplingParams, prompt: list[int], generated: list[int], logits: Tensor) -> Tensor:
    history = TokenHistory(prompt)
    history.sync(generated)
    history.check_integrity()
    chain = built_in_processors(params, eos_ids=EOS, ending_ids=EOS, vocab_size=len(logits), encode=None)
    values = logits.numpy()
    for processor in chain:
        values = processor(history, values)
    return torch.from_numpy(values)


def filtered(params: SamplingParams, logits: Tensor) -> Tensor:
    return torch.from_numpy(filter_logits(params, logits.numpy()))


def theirs(processors: list[Any], prompt: list[int], generated: list[int], logits: Tensor) -> Tensor:
    result: Tensor = LogitsProcessorList(processors)(torch.tensor([[*prompt, *generated]]), logits[None].clone())[0]
    return result


@given(prompts, ids, seeds, st.sampled_from([1.3, 0.8, 2.0]))
def test_repetition_penalty(prompt: list[int], generated: list[int], seed: int, penalty: float) -> None:
    logits = random_logits(seed)
    found = ours(SamplingParams(repetition_penalty=penalty), prompt, generated, logits)
    assert torch.equal(found, theirs([RepetitionPenaltyLogitsProcessor(penalty)], prompt, generated, logits))
    assert torch.equal(logits, random_logits(seed)), "the input was changed"


@given(prompts, ids, seeds, st.integers(1, 4))
def test_no_repeat_ngram(prompt: list[int], generated: list[int], seed: int, size: int) -> None:
    logits = random_logits(seed)
    found = ours(SamplingParams(no_repeat_ngram=size), prompt, generated, logits)
    assert torch.equal(found, theirs([NoRepeatNGramLogitsProcessor(size)], prompt, generated, logits))


@given(prompts, ids, seeds, words, st.data())
def test_bad_words(prompt: list[int], generated: list[int], seed: int, banned: Any, data: st.DataObject) -> None:
    whole = [*prompt, *generated]
    if len(whole) > 1:  # a word whose beginning is there
        length = data.draw(st.integers(1, min(2, len(whole) - 1)))
        banned = (*banned, (*whole[-length:], data.draw(st.integers(0, VOCAB - 1))))
    banned = tuple(word for word in banned if len(word) <= len(whole))  # transformers 5.2 ignores longer ones, 5.24 does not
    logits = random_logits(seed)
    found = ours(SamplingParams(bad_words=banned), prompt, generated, logits)
    listed = [list(word) for word in banned]
    if all(len(word) == 1 and word[0] in EOS for word in listed):
        assert torch.equal(found, logits)
    else:
        expected = theirs([NoBadWordsLogitsProcessor(listed, eos_token_id=list(EOS))], prompt, generated, logits)
        assert torch.equal(found, expected)


def test_a_bad_word_may_begin_at_the_first_token() -> None:
    logits = random_logits(0)
    found = ours(SamplingParams(bad_words=((4, 9), (1, 4, 8), (4, 4, 6))), [4], [], logits)
    assert torch.isinf(found).nonzero().flatten().tolist() == [9]


@given(prompts, ids, seeds, st.integers(0, 20))
def test_min_new_tokens(prompt: list[int], generated: list[int], seed: int, minimum: int) -> None:
    logits = random_logits(seed)
    found = ours(SamplingParams(min_new_tokens=minimum), prompt, generated, logits)
    oracle = MinNewTokensLengthLogitsProcessor(len(prompt), minimum, list(EOS))
    assert torch.equal(found, theirs([oracle], prompt, generated, logits))


@given(prompts, ids, seeds)
def test_all_together_in_the_order_of_transformers(prompt: list[int], generated: list[int], seed: int) -> None:
    params = SamplingParams(repetition_penalty=1.3, no_repeat_ngram=2, bad_words=((1,), (2, 5)), min_new_tokens=8)
    chain = [
        RepetitionPenaltyLogitsProcessor(1.3),
        NoRepeatNGramLogitsProcessor(2),
        NoBadWordsLogitsProcessor([[1], [2, 5]], eos_token_id=list(EOS)),
        MinNewTokensLengthLogitsProcessor(len(prompt), 8, list(EOS)),
    ]
    logits = random_logits(seed)
    assert torch.equal(ours(params, prompt, generated, logits), theirs(chain, prompt, generated, logits))


@given(ids, seeds)
def test_presence_and_frequency_count_generated_tokens_only(generated: list[int], seed: int) -> None:
    logits = random_logits(seed)
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    found = ours(params, [0, 1, 2, 2], generated, logits)
    expected = [
        value - 0.25 * generated.count(token) - (0.5 if token in generated else 0.0) for token, value in enumerate(logits)
    ]
    assert found.tolist() == pytest.approx([float(value) for value in expected], abs=1e-6)


@given(
    seeds,
    st.floats(0.05, 3.0),
    st.none() | st.integers(1, 40),
    st.none() | st.floats(0.01, 1.0),
    st.none() | st.floats(0.0, 1.0),
)
def test_filters(seed: int, temperature: float, top_k: int | None, top_p: float | None, min_p: float | None) -> None:
    logits = random_logits(seed, 200)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    chain: list[Any] = [TemperatureLogitsWarper(temperature)]
    chain += [TopKLogitsWarper(top_k)] if top_k is not None else []
    chain += [TopPLogitsWarper(top_p)] if top_p is not None and top_p < 1.0 else []
    chain += [MinPLogitsWarper(min_p)] if min_p is not None else []
    assert torch.equal(filtered(params, logits), theirs(chain, [0], [], logits))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.floats(0.05, 0.99))
def test_top_p_keeps_lower_ids_of_a_tie(levels: list[int], top_p: float) -> None:
    """Against a plain loop over (value, id) pairs, on logits that are nearly all ties."""
    logits = torch.tensor(levels, dtype=torch.float32)
    kept = torch.isfinite(filtered(SamplingParams(temperature=1.0, top_p=top_p), logits))
    order = sorted(range(len(levels)), key=lambda token: (levels[token], -token))
    mass = torch.softmax(logits[order], dim=-1).cumsum(dim=-1)
    expected = torch.zeros(len(levels), dtype=torch.bool)
    for rank, token in enumerate(order):
        expected[token] = bool(mass[rank] > 1 - top_p) or rank == len(order) - 1
    assert torch.equal(kept, expected)


def test_tiny_temperature_does_not_overflow() -> None:
    logits = torch.tensor([1.0, 5.0, 4.9, float("-inf")])
    for temperature in (1e-40, 1e-300):
        for shift in (0.0, -9.0):
            found = filtered(SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1), logits + shift)
            assert found.argmax() == 1
            assert not torch.isnan(found).any()
            assert torch.isfinite(found).sum() == 1


def test_ids_beyond_the_logits_are_ignored() -> None:
    logits = random_logits(1)
    params = SamplingParams(
        repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.5, no_repeat_ngram=1, min_new_tokens=9
    )
    outside = [VOCAB, VOCAB + 5, -1]
    found = ours(params, [2, *outside], [4, *outside], logits)
    assert torch.equal(found, ours(params, [2], [4], logits))


def test_bad_words_as_text_cover_the_word_with_a_space_before_it() -> None:
    def encode(text: str) -> list[int]:
        return {"dog": [5], " dog": [6], " cat": [7, 8], "hm": [9], " hm": []}[text]

    found = bad_word_ids(["dog", " cat", "hm", (5,), (3,)], eos_ids=[3], vocab_size=10, encode=encode)
    assert found == [(5,), (6,), (7, 8), (9,)]
    with pytest.raises(ConfigError, match="no tokenizer"):
        bad_word_ids(["dog"], eos_ids=[], vocab_size=10, encode=None)
    with pytest.raises(ConfigError, match="outside the vocabulary of 5"):
        bad_word_ids([(5,)], eos_ids=[], vocab_size=5, encode=None)
    with pytest.raises(ConfigError, match="encodes to no token"):
        bad_word_ids(["x"], eos_ids=[], vocab_size=5, encode=lambda text: [])


@given(st.lists(st.lists(st.integers(0, 3), max_size=300), min_size=1, max_size=8), prompts)
def test_history_forgets_rejected_drafts(looks: list[list[int]], prompt: list[int]) -> None:
    history = TokenHistory(prompt)
    for look in looks:
        history.sync(look)
        history.check_integrity()
        assert np.array_equal(history.ids, [*prompt, *look])
        assert np.array_equal(history.generated, look)
