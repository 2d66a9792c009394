"""SamplingParams: what is legal, what is refused and in which words."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from vericache_core.errors import ConfigError
from vericache_core.runtime.sampling_params import SamplingParams, stop_ids


def unchanged(prefix: tuple[int, ...], logits: Tensor) -> Tensor:
    return logits


def test_defaults_are_greedy_with_everything_off() -> None:
    params = SamplingParams()
    assert (params.max_new_tokens, params.min_new_tokens, params.temperature, params.seed) == (128, 0, 0.0, 0)
    assert params.greedy
    assert params.logprobs is None
    assert hash(params) == hash(SamplingParams())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", -1),
        ("max_new_tokens", 1.5),
        ("max_new_tokens", True),
        ("min_new_tokens", -1),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**64),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("nan")),
        ("presence_penalty", float("inf")),
        ("no_repeat_ngram", -1),
        ("stop", (1,)),
        ("stop", ("",)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", 5),
        ("bad_words", ((),)),
        ("bad_words", ("",)),
        ("bad_words", ((1.5,),)),
        ("bad_words", ((True,),)),
        ("bad_words", 7),
        ("ignore_eos", 1),
        ("logits_processors", unchanged),
        ("logits_processors", (1,)),
        ("logprobs", -1),
    ],
)
def test_bad_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.exit_code == 2


def test_min_above_max_is_refused_with_a_hint() -> None:
    with pytest.raises(ConfigError, match=r"min_new_tokens 5 is more than max_new_tokens 4.*hint: "):
        SamplingParams(max_new_tokens=4, min_new_tokens=5)


def test_lists_strings_and_numpy_values_are_normalised() -> None:
    loose: dict[str, Any] = {
        "stop": "END",
        "stop_token_ids": [1, np.int64(2)],
        "bad_words": [[1, 2], "word", (np.int32(3),)],
        "logits_processors": [unchanged],
        "top_k": 0,
        "temperature": 1,
    }
    params = SamplingParams(**loose)
    assert params.stop == ("END",)
    assert params.stop_token_ids == (1, 2)
    assert params.bad_words == ((1, 2), "word", (3,))
    assert params.logits_processors == (unchanged,)
    assert params.top_k is None
    assert isinstance(params.temperature, float)
    hash(params)
    assert dataclasses.replace(params, seed=3).seed == 3


def test_from_mapping_reads_what_a_command_line_gives() -> None:
    params = SamplingParams.from_mapping(
        {"max-new-tokens": "7", "temperature": "0.5", "top_k": "none", "stop": "a,b", "stop_token_ids": "3,4"}, text=True
    )
    assert params == SamplingParams(max_new_tokens=7, temperature=0.5, stop=("a,b",), stop_token_ids=(3, 4))
    with pytest.raises(ConfigError, match="max_new_tokens"):
        SamplingParams.from_mapping({"max_new_tokens": "7"})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("temprature", "did you mean 'temperature'"),
        ("max_tokens", "max_new_tokens"),
        ("num_beams", "beam search is not offered"),
        ("do_sample", "temperature > 0"),
        ("zzz", "valid parameters: max_new_tokens"),
    ],
)
def test_unknown_names_get_a_helpful_error(name: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams.from_mapping({name: 1})
    assert said in str(caught.value)


def test_stop_ids_join_eos_and_the_callers() -> None:
    assert stop_ids(SamplingParams(stop_token_ids=(5,)), [1, 2]) == {1, 2, 5}
    assert stop_ids(SamplingParams(stop_token_ids=(5,), ignore_eos=True), [1, 2]) == {5}
