"""Bodies of calls: what is read, and that nothing is overlooked."""

from __future__ import annotations

from typing import Any

import pytest

from vericache_core.errors import UsageError
from vericache_core.runtime.sampling_params import SamplingParams
from vericache_core.serve.answers import status_of
from vericache_core.serve.asks import Ask, read_ask

DEFAULTS = SamplingParams(max_new_tokens=77)
USER = {"role": "user", "content": "hello"}


def read(body: Any, *, chat: bool = False) -> Ask:
    return read_ask(body, chat=chat, model="m", defaults=DEFAULTS, compressor="snapkv")


def test_what_is_left_out_is_the_servers() -> None:
    ask = read({"prompt": "x"})
    assert ask == Ask(False, ("x",), DEFAULTS, False, 0, False, False)


def test_every_sampling_field_is_read() -> None:
    fields = {
        "max_tokens": 9,
        "min_tokens": 1,
        "temperature": 1,
        "top_k": 5,
        "top_p": 0.5,
        "min_p": 0.1,
        "seed": 3,
        "stop": "END",
        "stop_token_ids": [4],
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
    }
    assert read({"prompt": "x", **fields}).params == SamplingParams(
        max_new_tokens=9,
        min_new_tokens=1,
        temperature=1.0,
        top_k=5,
        top_p=0.5,
        min_p=0.1,
        seed=3,
        stop=("END",),
        stop_token_ids=(4,),
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        ignore_eos=True,
    )


def test_what_clients_send_by_default_is_let_through() -> None:
    """Values that ask for nothing, and fields about the caller."""
    body = {
        "prompt": "x",
        "n": 1,
        "logprobs": None,
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "user": "me",
        "stop": None,
        "temperature": None,
        "stream_options": None,
    }
    assert read(body) == read({"prompt": "x"})


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ([], "JSON object"),
        ({}, "prompt is missing"),
        ({"prompt": None}, "prompt is missing"),
        ({"prompt": "x", "temprature": 1}, "unknown field 'temprature'; did you mean 'temperature'?"),
        ({"prompt": "x", "messages": [USER]}, "unknown field 'messages'"),
        ({"prompt": "x", "n": 2}, "n is not served"),
        ({"prompt": "x", "n": True}, "n is not served"),
        ({"prompt": "x", "echo": True}, "echo is not served"),
        ({"prompt": "x", "logprobs": 0}, "logprobs is not served"),
        ({"prompt": "x", "tools": [{"type": "function"}]}, "tools is not served"),
        ({"prompt": "x", "tool_choice": "required"}, "tool_choice is not served"),
        ({"prompt": "x", "response_format": {"type": "json_object"}}, "response_format is not served"),
        ({"prompt": "x", "logit_bias": {"4": 1}}, "logit_bias is not served"),
        ({"prompt": "x", "max_tokens": -1}, "max_new_tokens"),
        ({"prompt": "x", "max_tokens": "9"}, "max_new_tokens"),
        ({"prompt": "x", "max_tokens": 1, "max_completion_tokens": 2}, "are both given"),
        ({"prompt": "x", "temperature": -1}, "temperature"),
        ({"prompt": "x", "temperature": float("nan")}, "temperature"),
        ({"prompt": "x", "top_p": 0}, "top_p"),
        ({"prompt": "x", "stop": [""]}, "an empty string matches everywhere"),
        ({"prompt": "x", "stop": 4}, "stop"),
        ({"prompt": "x", "stream": 1}, "stream is to be of type bool"),
        ({"prompt": "x", "priority": True}, "priority is to be of type int"),
        ({"prompt": "x", "compressor": "kivi"}, "compressor 'kivi' does not draft here"),
        ({"prompt": ["x"] * 257}, "257 prompts"),
        ({"prompt": "x", "model": "other"}, "there is no model 'other' here"),
        ({"prompt": "x", "model": 4}, "there is no model 4 here"),
    ],
)
def test_what_is_wrong_is_named(body: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(body)
    assert words in str(caught.value)
    assert status_of(caught.value) in {400, 404}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one message"),
        ("hello", "a list of at least one message"),
        (["hello"], "messages[0] is to be an object with a role"),
        ([USER, {"content": "x"}], "messages[1] is to be an object with a role"),
        ([{"role": "user"}], "messages[0]: content is to be text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0]: a part of the content is no text"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0]: tool_calls is not served"),
    ],
)
def test_messages_that_cannot_be_read(messages: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        read({"messages": messages}, chat=True)
    assert words in str(caught.value)


def test_parts_of_text_are_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    ask = read({"messages": [{"role": "user", "content": parts}]}, chat=True)
    assert ask.prompts == ([{"role": "user", "content": "ab"}],)


def test_a_sampling_call_draws_a_seed_and_a_greedy_one_does_not() -> None:
    drawn = {read({"prompt": "x", "temperature": 1.0}).params.seed for _ in range(4)}
    assert len(drawn) == 4
    assert read({"prompt": "x"}).params.seed == DEFAULTS.seed
    assert read({"prompt": "x", "temperature": 1.0, "seed": 5}).params.seed == 5
