"""Log probabilities over the API: those of plain decoding, to the last bit; and tokens as text and bytes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from tests.serve.served import MODEL, Served, byte_tokenizer, served, tiny_engine
from vericache_core.engine import Engine
from vericache_core.runtime.output import TokenLogprobs
from vericache_core.runtime.sampling_params import SamplingParams
from vericache_core.serve.logprobs import LEAST, LogprobWriter, TokenTexts

BYTES = byte_tokenizer()
PROMPT = "the quick brown fox "


def pieces_tokenizer() -> PreTrainedTokenizerFast:
    """As SentencePiece makes them: words that begin with ``▁``, and bytes for what has no piece of its own."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "é", "a"]
    core = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made = PreTrainedTokenizerFast(tokenizer_object=core)
    made.add_special_tokens({"eos_token": "</s>"})
    return made


@given(st.text())
def test_bytes_of_tokens_are_the_bytes_of_their_text(text: str) -> None:
    texts = TokenTexts(BYTES)
    assert b"".join(texts.bytes_of(token) for token in BYTES.encode(text)) == text.encode()


def test_a_part_of_a_character_is_written_as_bytes() -> None:
    texts = TokenTexts(BYTES)
    assert [texts.text(token) for token in BYTES.encode("aé")] == ["a", "bytes:\\xc3", "bytes:\\xa9"]


def test_pieces_of_words_and_bytes_and_special_tokens() -> None:
    tokenizer = pieces_tokenizer()
    texts = TokenTexts(tokenizer)
    ids = tokenizer.convert_tokens_to_ids(["▁the", "é", "<0xC3>", "</s>"])
    assert [texts.bytes_of(token) for token in ids] == [b" the", "é".encode(), b"\xc3", b"</s>"]
    assert texts.bytes_of(100_000) == b""


def test_both_forms() -> None:
    first, second = BYTES.encode("é")
    entries = [
        TokenLogprobs(first, -0.5, ((first, -0.5), (second, float("-inf")))),
        TokenLogprobs(second, float("-inf"), ()),
    ]
    chat = LogprobWriter(TokenTexts(BYTES), chat=True).write(entries)
    assert chat["content"][0] == {
        "token": "bytes:\\xc3",
        "logprob": -0.5,
        "bytes": [0xC3],
        "top_logprobs": [
            {"token": "bytes:\\xc3", "logprob": -0.5, "bytes": [0xC3]},
            {"token": "bytes:\\xa9", "logprob": LEAST, "bytes": [0xA9]},
        ],
    }
    writer = LogprobWriter(TokenTexts(BYTES), chat=False)
    parts = [writer.write(entries), writer.write(entries)]
    assert [part["text_offset"] for part in parts] == [[0, 0], [1, 1]]
    assert parts[0]["top_logprobs"] == [{"bytes:\\xc3": -0.5, "bytes:\\xa9": LEAST}, {}]
    assert parts[0]["token_logprobs"] == [-0.5, LEAST]
    json.dumps([chat, parts], allow_nan=False)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(tiny_engine()) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    with tiny_engine(compressor=None, keep=None) as engine:
        yield engine


def test_they_are_those_of_plain_decoding(client: openai.OpenAI, plain: Engine) -> None:
    messages: Any = [{"role": "user", "content": PROMPT}]
    (expected,) = plain.generate([messages], SamplingParams(max_new_tokens=16, logprobs=3))
    assert expected.logprobs is not None
    body: Any = {"model": MODEL, "messages": messages, "max_tokens": 16, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**body).choices[0]
    assert whole.logprobs is not None
    got = whole.logprobs.content or []
    assert [entry.logprob for entry in got] == [entry.logprob for entry in expected.logprobs]
    top = [[other.logprob for other in entry.top_logprobs] for entry in got]
    assert top == [[value for _, value in entry.top] for entry in expected.logprobs]
    said = b"".join(bytes(entry.bytes or []) for entry in got).decode(errors="replace")
    assert said == whole.message.content == expected.text
    streamed = [
        entry
        for chunk in client.chat.completions.create(**body, stream=True)
        for choice in chunk.choices
        for entry in (choice.logprobs.content if choice.logprobs else None) or []
    ]
    assert streamed == got


def test_a_completion_has_its_own_form(client: openai.OpenAI) -> None:
    body: Any = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "logprobs": 2}
    whole = client.completions.create(**body).choices[0]
    assert whole.logprobs is not None
    assert whole.logprobs.text_offset is not None
    assert len(whole.logprobs.tokens or []) == len(whole.logprobs.text_offset) == 12
    # Equal keys (none here) would leave fewer.
    assert {len(top) for top in whole.logprobs.top_logprobs or []} == {2}
    parts: list[Any] = [choice.logprobs for chunk in client.completions.create(**body, stream=True) for choice in chunk.choices]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [entry for part in parts if part for entry in getattr(part, name)] == getattr(whole.logprobs, name)


def test_a_stop_string_holds_text_back_and_no_log_probabilities(server: Served) -> None:
    """Tokens whose text may begin a stop string are told of at once; all of them are told of in the end."""
    text = server.ask("/v1/completions", {"prompt": PROMPT, "max_tokens": 12}).json["choices"][0]["text"]
    events = server.ask(
        "/v1/completions", {"prompt": PROMPT, "max_tokens": 12, "logprobs": 0, "stop": text + "!", "stream": True}
    ).events
    told = [len((event["choices"][0]["logprobs"] or {"tokens": []})["tokens"]) for event in events]
    assert sum(told) == 12
    assert "".join(event["choices"][0]["text"] for event in events) == text


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_what_single_calls_with_their_seeds_are(server: Served, plain: Engine, stream: bool) -> None:
    prompts = [PROMPT, PROMPT[4:]]
    body = {"prompt": prompts, "n": 3, "temperature": 1.5, "seed": 2**64 - 1, "max_tokens": 10}
    seeds = [2**64 - 1, 0, 1]
    alone = [SamplingParams(max_new_tokens=10, temperature=1.5, seed=seed) for seed in seeds]
    expected = [output.text for prompt in prompts for output in plain.generate([prompt] * 3, alone)]
    assert len(set(expected)) == 6
    answer = server.ask("/v1/completions", {**body, "stream": stream, "stream_options": {"include_usage": True}})
    if not stream:
        got = [choice["text"] for choice in answer.json["choices"]]
        usage = answer.json["usage"]
    else:
        *events, last = answer.events
        texts: dict[int, str] = {}
        for event in events:
            (choice,) = event["choices"]
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        got, usage = [texts[index] for index in range(6)], last["usage"]
    assert got == expected
    assert usage["prompt_tokens"] == sum(map(len, prompts))
    assert usage["completion_tokens"] == 60


def test_choices_of_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "x"}], n=2, temperature=1.5, max_tokens=8
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].message.content != answer.choices[1].message.content
