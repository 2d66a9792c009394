"""Bodies of calls: what is read, and that nothing is overlooked."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serve.served import byte_tokenizer
from vericache_core.errors import UsageError
from vericache_core.model.prompts import Chat
from vericache_core.runtime.sampling_params import SamplingParams
from vericache_core.serve.answers import status_of
from vericache_core.serve.asks import Ask, read_ask
from vericache_core.serve.dialect import NO_TOOLS, Dialect
from vericache_core.serve.grammar import Grammars
from vericache_core.serve.tool_calls import TaggedCalls

DEFAULTS = SamplingParams(max_new_tokens=77)
USER = {"role": "user", "content": "hello"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
GRAMMARS = Grammars(byte_tokenizer(), 256, [0])
KNOWS_TOOLS = Dialect(TaggedCalls, "tagged JSON")


def read(body: Any, *, chat: bool = False, dialect: Dialect = NO_TOOLS) -> Ask:
    return read_ask(body, chat=chat, model="m", defaults=DEFAULTS, compressor="snapkv", dialect=dialect, grammars=GRAMMARS)


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
        ({"prompt": "x", "n": 0}, "n is to be 1 to 128, not 0"),
        ({"prompt": "x", "n": True}, "n is to be of type int"),
        ({"prompt": ["x"] * 100, "n": 3}, "100 prompts and n=3 make 300 choices"),
        ({"prompt": "x", "best_of": 2}, "best_of is not served"),
        ({"prompt": "x", "echo": True}, "echo is not served"),
        ({"prompt": "x", "logprobs": 21}, "logprobs is to be 0 to 20, not 21"),
        ({"prompt": "x", "logprobs": True}, "logprobs is to be of type int"),
        ({"prompt": "x", "top_logprobs": 2}, "top_logprobs is not served"),
        ({"prompt": "x", "tools": [{"type": "function"}]}, "tools is not served (a completion has no messages)"),
        ({"prompt": "x", "parallel_tool_calls": False}, "parallel_tool_calls is not served"),
        ({"prompt": "x", "functions": [{"name": "f"}]}, "functions is not served; hint: tools and tool_choice are"),
        ({"prompt": "x", "tool_choice": "required"}, "tool_choice is not served"),
        ({"prompt": "x", "response_format": {"type": "json_object"}}, "response_format is not served (only a chat"),
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
    assert ask.prompts == (Chat([{"role": "user", "content": "ab"}]),)


def test_a_sampling_call_draws_a_seed_and_a_greedy_one_does_not() -> None:
    drawn = {read({"prompt": "x", "temperature": 1.0}).params.seed for _ in range(4)}
    assert len(drawn) == 4
    assert read({"prompt": "x"}).params.seed == DEFAULTS.seed
    assert read({"prompt": "x", "temperature": 1.0, "seed": 5}).params.seed == 5


def test_tools_and_what_was_said_with_them_reach_the_template() -> None:
    tool = {"type": "function", "function": {**TOOL["function"], "strict": False}}
    said = {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None}
    answer = {"role": "tool", "tool_call_id": "c", "content": "4"}
    ask = read({"messages": [USER, said, answer], "tools": [tool], "tool_choice": "auto"}, chat=True, dialect=KNOWS_TOOLS)
    function = {"name": "f", "arguments": {"a": 1}}
    call = {"id": "c", "type": "function", "function": function}
    assert ask.prompts == (Chat([USER, {"role": "assistant", "content": "", "tool_calls": [call]}, answer], [TOOL]),)
    assert ask.reader is not None
    assert isinstance(ask.reader(), TaggedCalls)


def test_who_may_call_nothing_is_told_of_no_tools() -> None:
    ask = read({"messages": [USER], "tools": [TOOL], "tool_choice": "none"}, chat=True, dialect=KNOWS_TOOLS)
    assert ask == read({"messages": [USER]}, chat=True)


@pytest.mark.parametrize(
    ("further", "words"),
    [
        ({"tools": [4]}, "tools[0] is to be a function with a name"),
        ({"tools": [TOOL, {"type": "function", "function": {"name": ""}}]}, "tools[1] is to be a function with a name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0] is to be a function with a name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "parameters is to be a JSON schema"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools[0]: strict is not served"),
        ({"logprobs": 2}, "logprobs is to be of type bool"),
        ({"top_logprobs": 2}, "top_logprobs without logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs is to be 0 to 20, not 21"),
        ({"response_format": {"type": "xml"}}, "response_format is to be text, json_object, or json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "json_schema with a schema"),
        ({"response_format": {"type": "json_object"}, "tools": [TOOL]}, "only a chat without tools"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 3}, "response_format ends answers itself"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
            'the schema cannot be enforced (Unimplemented keys: ["not"])',
        ),
        ({"tools": {}}, "tools is to be of type list"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice is not served"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice is not served"),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls is not served"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0]: tool_calls is not served"),
        ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "messages[0]: tool_calls is to be a list"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0]: tool_calls[0] is to have a function"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages[0]: tool_calls[0]: arguments are no JSON",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "4"}}]}]},
            "messages[0]: tool_calls[0]: arguments are to be a JSON object",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}]},
            "messages[0]: tool_calls[0]: arguments are no JSON",
        ),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0]: content is to be text"),
    ],
)
def test_fields_of_a_chat_that_cannot_be_read(further: Any, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        read({"messages": [USER], **further}, chat=True, dialect=KNOWS_TOOLS)
    assert words in str(caught.value)


def test_why_a_model_takes_no_tools_is_said() -> None:
    with pytest.raises(UsageError, match=r"tools is not served \(there is no chat template\)"):
        read({"messages": [USER], "tools": [TOOL]}, chat=True)


def test_log_probabilities_are_asked_for_in_two_ways() -> None:
    assert [read({"prompt": "x", "logprobs": asked}).params.logprobs for asked in (None, False, 0, 5)] == [None, None, 0, 5]
    chats: list[dict[str, Any]] = [{}, {"logprobs": False, "top_logprobs": 0}, {"logprobs": True}]
    chats.append({"logprobs": True, "top_logprobs": 4})
    assert [read({"messages": [USER], **asked}, chat=True).params.logprobs for asked in chats] == [None, None, 0, 4]


def test_choices_count_their_seeds_up() -> None:
    ask = read({"prompt": ["x", "y"], "n": 2, "temperature": 1, "seed": 6})
    assert [(prompt, params.seed) for prompt, params in ask.requests()] == [("x", 6), ("x", 7), ("y", 6), ("y", 7)]
