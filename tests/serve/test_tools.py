"""Tools over a real socket, by the official client: what a model writes as a call arrives as one, streamed or not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.models import build, engine_over
from tests.serve.served import CALLING, DEFAULTS, MODEL, Repeats, byte_tokenizer, served, tiny_engine
from vericache_core.engine import Engine
from vericache_core.model.prompts import Chat, Prompt
from vericache_core.runtime.sampling_params import SamplingParams

END = 256
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
OSLO, ROME = '{"city":"Oslo"}', '{"city":  "Rome\\u00e9"}'


def called(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'


def engine(**settings: Any) -> Engine:
    """A random Llama over bytes that knows tools and an end; it drafts with half of its KV."""
    tokenizer = byte_tokenizer(CALLING)
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    model = build("llama", vocab_size=END + 1, eos_token_id=END)
    return engine_over(model, tokenizer, **{"compressor": "random", "keep": 0.5, **settings})


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    """A client of a model that repeats what it is told."""
    params = SamplingParams(max_new_tokens=256, logits_processors=(Repeats(END),))
    with (
        served(engine(), defaults=params) as running,
        openai.OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def ask(client: openai.OpenAI, text: str, stream: bool, **further: Any) -> tuple[str | None, list[tuple[str, str]], str | None]:
    """Content, calls and finish reason of an answer that is ``text``, put together from its chunks if it was streamed."""
    body: Any = {"model": MODEL, "messages": [{"role": "user", "content": text}], "tools": [TOOL], **further}
    if not stream:
        choice = client.chat.completions.create(**body).choices[0]
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
        return choice.message.content, calls, choice.finish_reason
    content, reason = "", None
    pieces: dict[int, tuple[str, str]] = {}
    for chunk in client.chat.completions.create(**body, stream=True):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            name, arguments = pieces.get(call.index, ("", ""))
            pieces[call.index] = (name + (call.function.name or ""), arguments + (call.function.arguments or ""))
        reason = choice.finish_reason or reason
    return content or None, [pieces[index] for index in sorted(pieces)], reason


BOTH = f"Look:\n{called(OSLO)}\n{called(ROME)}"
BROKEN = '<tool_call>\n{"name": "weather", "arguments": {"city": Oslo}}\n</tool_call> '


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "further", "answer"),
    [
        (BOTH, {}, ("Look:", [("weather", OSLO), ("weather", ROME)], "tool_calls")),
        (called(OSLO), {}, (None, [("weather", OSLO)], "tool_calls")),
        (BROKEN, {}, (BROKEN, [], "stop")),
        (called(OSLO), {"tool_choice": "none"}, (called(OSLO), [], "stop")),
        (called(OSLO), {"tools": []}, (called(OSLO), [], "stop")),
        (called(OSLO) + " <tool_call>", {"max_tokens": len(called(OSLO)) + 5}, ("<too", [("weather", OSLO)], "length")),
    ],
)
def test_calls_arrive_as_calls_and_the_rest_as_content(
    client: openai.OpenAI, text: str, further: dict[str, Any], answer: Any, stream: bool
) -> None:
    assert ask(client, text, stream, **further) == answer


def test_what_was_called_and_answered_goes_back_through_the_template() -> None:
    call = {"id": "abc123def", "type": "function", "function": {"name": "weather", "arguments": OSLO}}
    question = {"role": "user", "content": "Is it cold?"}
    messages = [
        question,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abc123def", "content": "4 degrees"},
    ]
    prompt = (
        f"{json.dumps([TOOL])}\nuser: Is it cold?\nassistant: \n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\ntool: 4 degrees\nassistant: '
    )
    with engine(compressor=None, keep=None) as plain, served(engine()) as running:
        (output,) = plain.generate([prompt], DEFAULTS)
        answer = running.ask("/v1/chat/completions", {"messages": messages, "tools": [TOOL]}).json
    assert answer["choices"][0]["message"]["content"] == output.text
    assert answer["usage"]["prompt_tokens"] == len(prompt.encode())


def test_the_engine_takes_tools_without_a_server() -> None:
    """A `Chat` is one prompt, alone or among others."""
    with engine() as drafting:
        chat = Chat([{"role": "user", "content": "hello"}], [TOOL])
        (alone,) = drafting.generate(chat, DEFAULTS)
        prompts: list[Prompt] = [chat, "text"]
        first, _ = drafting.generate(prompts, DEFAULTS)
        asked = drafting.tokenizer.decode(alone.prompt_token_ids)
    assert alone.token_ids == first.token_ids
    assert asked == f"{json.dumps([TOOL])}\nuser: hello\nassistant: "


def test_a_model_without_tools_says_why() -> None:
    with served(tiny_engine()) as running:
        answer = running.ask("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL]})
    assert answer.status == 400
    assert "tools is not served (the chat template has no place for them)" in answer.json["error"]["message"]
