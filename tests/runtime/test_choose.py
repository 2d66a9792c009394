"""TokenChooser: ties, errors, logprobs, and that drafting leaves no trace."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.runtime.toys import speculate, toy_logits
from vericache_core.errors import ConfigError, NonFiniteError, VeriCacheError
from vericache_core.runtime.choose import Choice, TokenChooser, to_float32, top_entries
from vericache_core.runtime.sampling_params import SamplingParams
from vericache_core.topk import first_argmax

VOCAB = 16
NAN, INF = float("nan"), float("inf")
PROMPT = (4, 2, 4)


def chooser_for(params: SamplingParams | None = None, vocab: int = VOCAB) -> TokenChooser:
    return TokenChooser(params or SamplingParams(), PROMPT, [3], vocab)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(st.lists(st.integers(-3, 3), min_size=VOCAB, max_size=200))
def test_greedy_takes_the_lowest_of_equals(dtype: torch.dtype, levels: list[int]) -> None:
    logits = torch.tensor(levels, dtype=dtype)
    choice = chooser_for(vocab=len(levels)).choose(logits, [])
    assert choice.token == levels.index(max(levels)) == first_argmax(logits)
    assert choice.margin == max(levels) - sorted(levels)[-2]
    assert choice == Choice(choice.token, choice.margin)


def test_values_that_differ_only_below_bfloat16_are_a_tie_there_and_not_in_float32() -> None:
    logits = torch.tensor([0.0, 1.0, 1.0 + 1e-4, 0.5])
    assert chooser_for(vocab=4).choose(logits, []).token == 2
    assert chooser_for(vocab=4).choose(logits.bfloat16(), []).token == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_conversion_to_float32_is_that_of_torch(dtype: torch.dtype) -> None:
    bits = torch.randint(-(2**15), 2**15, (4096,), generator=torch.Generator().manual_seed(0), dtype=torch.int16)
    values = bits.view(torch.float16 if dtype is torch.float16 else torch.bfloat16).to(dtype)
    for logits in (values, values[::3]):
        found, expected = to_float32(logits), logits.float().numpy()
        assert found.dtype == np.float32
        assert np.array_equal(found, expected, equal_nan=True)
        assert np.array_equal(np.signbit(found), np.signbit(expected))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_finite_logits_that_a_penalty_overflows_still_give_a_token(temperature: float) -> None:
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=1e38, temperature=temperature)
    logits = torch.full((VOCAB,), -1.0)
    logits[4] = -3e38
    assert chooser_for(params).choose(logits, [4, 4, 4, 4]).token != 4


def test_signed_zeros_are_equal() -> None:
    for length in (2, 17, 64, 1000):
        logits = torch.full((length,), -1.0)
        logits[length // 2], logits[-1] = -0.0, 0.0
        assert chooser_for(vocab=length).choose(logits, []).token == first_argmax(logits) == length // 2


def test_margin_is_infinite_when_nothing_else_is_allowed() -> None:
    logits = torch.full((VOCAB,), -INF)
    logits[5] = -2.0
    assert chooser_for().choose(logits, []) == Choice(5, INF)
    assert TokenChooser(SamplingParams(), [0], [], 1).choose(torch.zeros(1), []) == Choice(0, INF)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("position", [0, 7, VOCAB - 1])
@pytest.mark.parametrize("value", [NAN, INF])
def test_non_finite_logits_are_an_error_for_choose_and_harmless_for_draft(
    value: float, position: int, temperature: float
) -> None:
    chooser = chooser_for(SamplingParams(temperature=temperature, repetition_penalty=1.1, top_p=0.9, logprobs=1))
    logits = torch.zeros(VOCAB)
    logits[position] = value
    with pytest.raises(NonFiniteError, match="the model's logits"):
        chooser.choose(logits, [])
    assert chooser.draft(logits, []) == 0
    masked = torch.full((VOCAB,), -INF)
    with pytest.raises(NonFiniteError):
        chooser.choose(masked, [])
    assert chooser.draft(masked, []) == 0


def test_processors_that_leave_nothing_are_an_error_with_a_hint() -> None:
    chooser = chooser_for(SamplingParams(bad_words=tuple((token,) for token in range(VOCAB) if token != 3), min_new_tokens=1))
    with pytest.raises(NonFiniteError, match=r"processed logits.*hint"):
        chooser.choose(torch.zeros(VOCAB), [])
    assert chooser.draft(torch.zeros(VOCAB), []) == 0
    assert chooser.choose(torch.zeros(VOCAB), [1]).token == 3


def test_wrong_shapes() -> None:
    with pytest.raises(VeriCacheError, match="shape"):
        chooser_for().choose(torch.zeros(VOCAB + 1), [])
    assert chooser_for().draft(torch.zeros(1, VOCAB), []) == 0


def test_bad_words_are_checked_when_the_chooser_is_made() -> None:
    with pytest.raises(ConfigError, match="bad_words"):
        chooser_for(SamplingParams(bad_words=((VOCAB,),)))
    chooser = TokenChooser(SamplingParams(bad_words=("b",)), PROMPT, [], VOCAB, encode=lambda text: [9] * len(text))
    logits = torch.zeros(VOCAB)
    logits[9] = 1.0
    assert chooser.choose(logits, []).token == 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("count", [0, 1, 3, VOCAB, 99])
def test_logprobs_are_those_of_the_raw_logits(count: int, temperature: float) -> None:
    params = SamplingParams(logprobs=count, repetition_penalty=3.0, temperature=temperature, top_k=2)
    logits = toy_logits(VOCAB)([1, 2, 3])
    choice = chooser_for(params).choose(logits, [1])
    expected = torch.log_softmax(logits, dim=-1)
    assert choice.logprob == float(expected[choice.token])
    assert choice.top_logprobs == tuple(
        (int(token), float(expected[token])) for token in expected.argsort(descending=True)[:count]
    )


@given(st.lists(st.integers(0, 3) | st.just(-INF), min_size=1, max_size=40), st.integers(0, 45))
def test_top_entries_order_ties_by_id(values: list[float], count: int) -> None:
    expected = sorted(enumerate(values), key=lambda entry: (-entry[1], entry[0]))[:count]
    assert top_entries(np.array(values, dtype=np.float32), count) == tuple(expected)


class Recorder:
    """A stateful processor: counts its calls, remembers what it saw, and lets both steer the logits."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, prefix_ids: tuple[int, ...], logits: Tensor) -> Tensor:
        self.seen.append(prefix_ids)
        logits[(len(self.seen) * 5) % VOCAB] += 2.0
        logits[prefix_ids[-1]] -= 1.0
        return logits


def reference(params: SamplingParams, model: Callable[[Sequence[int]], Tensor], tokens: int) -> list[Choice]:
    """One token at a time, with a chooser that never drafts."""
    chooser = chooser_for(params)
    generated: list[int] = []
    choices = []
    for _ in range(tokens):
        choices.append(chooser.choose(model([*PROMPT, *generated]), generated))
        generated.append(choices[-1].token)
    return choices


HEAVY: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "no_repeat_ngram": 3,
    "min_new_tokens": 10,
    "bad_words": ((1,), (2, 5)),
    "logprobs": 2,
}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("drafts", ["own", "oracle", "anti", "noisy", "garbage"])
@pytest.mark.parametrize("window", [1, 4, 8])
def test_drafts_leave_no_trace(drafts: str, temperature: float, window: int) -> None:
    model, tokens = toy_logits(VOCAB), 40
    alone, together = Recorder(), Recorder()
    expected = reference(SamplingParams(logits_processors=(alone,), temperature=temperature, top_p=0.9, **HEAVY), model, tokens)
    truth = [choice.token for choice in expected]

    def drafter(past: Sequence[int], own: int) -> int:
        right = truth[len(past)] if len(past) < tokens else 0
        noisy = right if len(past) % 3 else (right + 1) % VOCAB
        table = {
            "own": own,
            "oracle": right,
            "anti": (right + 1) % VOCAB,
            "noisy": noisy,
            "garbage": -7 + 10**6 * (len(past) % 2),
        }
        return table[drafts]

    params = SamplingParams(logits_processors=(together,), temperature=temperature, top_p=0.9, **HEAVY)
    found = speculate(chooser_for(params), model, PROMPT, drafter, tokens=tokens, window=window)
    assert found == expected
    assert together.seen == alone.seen == [(*PROMPT, *truth[:count]) for count in range(tokens)]


def test_own_drafts_without_custom_processors_are_always_right() -> None:
    """Draft and choose share processors and noise, so equal logits give equal tokens."""
    params = SamplingParams(temperature=0.9, top_k=9, min_p=0.01, seed=8, **HEAVY)
    chooser, model = chooser_for(params), toy_logits(VOCAB)
    generated: list[int] = []
    for _ in range(40):
        logits = model([*PROMPT, *generated])
        assert chooser.draft(logits, generated) == chooser.choose(logits, generated).token
        generated.append(chooser.choose(logits, generated).token)


class Brackets:
    """A grammar over 16 tokens: from the marker on, 5 opens and 6 closes, nothing else, and never below zero."""

    def __init__(self, marker: int) -> None:
        self.marker, self.depth, self.on, self.length = marker, 0, False, len(PROMPT)

    def clone(self) -> Brackets:
        return Brackets(self.marker)

    def __call__(self, prefix_ids: tuple[int, ...], logits: Tensor) -> Tensor:
        for token in prefix_ids[self.length :]:
            self.depth += {5: 1, 6: -1}.get(token, 0) if self.on else 0
            self.on = self.on or token == self.marker
        self.length = len(prefix_ids)
        if not self.on:
            return logits
        mask = torch.full_like(logits, -INF)
        mask[5] = 0.0
        mask[6] = 0.0 if self.depth else -INF
        return logits + mask


@pytest.mark.parametrize("index", range(9))
def test_grammar_switched_on_at_any_index_of_a_block(index: int) -> None:
    def force(prefix_ids: tuple[int, ...], logits: Tensor) -> Tensor:
        position = len(prefix_ids) - len(PROMPT)
        logits[9] = 100.0 if position == index else -INF
        return logits

    params = SamplingParams(logits_processors=(force, Brackets(marker=9)))
    model, tokens = toy_logits(VOCAB, seed=index), 30
    truth = [choice.token for choice in reference(params, model, tokens)]
    found = speculate(chooser_for(params), model, PROMPT, lambda past, own: (own + len(past)) % VOCAB, tokens=tokens, window=8)
    assert [choice.token for choice in found] == truth
    assert truth[index] == 9
    depth = 0
    for token in truth[index + 1 :]:
        depth += {5: 1, 6: -1}[token]
        assert depth >= 0


def test_clone_gives_each_request_its_own_processor() -> None:
    shared = Brackets(marker=0)
    first, second = (chooser_for(SamplingParams(logits_processors=(shared,))) for _ in range(2))
    for chooser in (first, second):
        chooser.choose(torch.zeros(VOCAB), [])
        chooser.choose(torch.zeros(VOCAB), [0])
    assert (shared.depth, shared.on, shared.length) == (0, False, len(PROMPT))


def test_asking_again_answers_the_same_without_another_call() -> None:
    recorder = Recorder()
    chooser = chooser_for(SamplingParams(logits_processors=(recorder,)))
    logits = torch.zeros(VOCAB)
    first = chooser.choose(logits, [])
    assert chooser.choose(logits, []) == first
    assert len(recorder.seen) == 1
    for wrong in ([first.token, 1], [(first.token + 1) % VOCAB]):
        with pytest.raises(VeriCacheError, match="every committed prefix in order"):
            chooser.choose(logits, wrong)
    assert len(recorder.seen) == 1


def test_a_processor_may_change_its_input_without_changing_ours() -> None:
    def spoil(prefix_ids: tuple[int, ...], logits: Tensor) -> Tensor:
        return logits.fill_(0.0)

    logits = toy_logits(VOCAB)([1])
    before = logits.clone()
    choice = chooser_for(SamplingParams(logits_processors=(spoil,), logprobs=0)).choose(logits, [])
    assert torch.equal(logits, before)
    assert choice.token == 0
    assert choice.logprob == float(torch.log_softmax(before, dim=-1)[0])


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (None, "returned NoneType"),
        (torch.zeros(3), r"returned shape \(3,\)"),
        (torch.full((VOCAB,), NAN), "returned NaN"),
        (torch.full((VOCAB,), -INF), "returned NaN"),
    ],
)
def test_a_processor_that_breaks_the_contract_is_named(result: Any, said: str) -> None:
    def breaks_it(prefix_ids: tuple[int, ...], logits: Tensor) -> Any:
        return result

    chooser = chooser_for(SamplingParams(logits_processors=(breaks_it,)))
    with pytest.raises(VeriCacheError, match=f"breaks_it {said}"):
        chooser.choose(torch.zeros(VOCAB), [])


def test_a_processor_that_raises_is_named_and_its_error_kept() -> None:
    class Fails:
        def __call__(self, prefix_ids: tuple[int, ...], logits: Tensor) -> Tensor:
            raise KeyError("oops")

    chooser = chooser_for(SamplingParams(logits_processors=(Fails(),)))
    with pytest.raises(VeriCacheError, match=r"Fails failed after 3 tokens \(KeyError: 'oops'\)") as caught:
        chooser.choose(torch.zeros(VOCAB), [])
    assert isinstance(caught.value.__cause__, KeyError)
    assert chooser.draft(torch.ones(VOCAB), []) == 0


def test_sampling_is_seeded_and_small_temperatures_approach_greedy() -> None:
    model = toy_logits(VOCAB)
    runs = [[choice.token for choice in reference(SamplingParams(temperature=1.0, seed=seed), model, 30)] for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    cold = [choice.token for choice in reference(SamplingParams(temperature=1e-6), model, 30)]
    assert cold == [choice.token for choice in reference(SamplingParams(), model, 30)]


def test_plain_greedy_is_cheap_at_a_real_vocabulary() -> None:
    """A guard against whole-vocabulary work creeping in, with a wide margin for busy machines."""
    chooser = TokenChooser(SamplingParams(), PROMPT, [3], 49152)
    logits = torch.randn(49152, generator=torch.Generator().manual_seed(0)).bfloat16()
    best = float("inf")
    for _ in range(50):
        start = time.perf_counter()
        chooser.choose(logits, [])
        best = min(best, time.perf_counter() - start)
    assert best < 1e-3
