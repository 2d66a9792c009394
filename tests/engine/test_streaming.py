"""Streaming, stop strings over token and block boundaries, and cancelling."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.drafters import Noisy, Oracle, Scripted, drafting
from tests.models import build, engine_over, prompt
from tests.runtime.toys import byte_level_tokenizer
from vericache_core.engine import Engine
from vericache_core.errors import PromptError, VeriCacheError
from vericache_core.outputs import RequestOutput
from vericache_core.runtime.sampling_params import SamplingParams

TOKENS = 30


@functools.cache
def tokenizer() -> Any:
    return byte_level_tokenizer()


def talking(**settings: Any) -> Engine:
    """GPT-2 whose tokens are bytes and some pieces; EOS is off so that text decides."""
    size = len(tokenizer())
    return engine_over(_model(size), tokenizer(), window=5, compressor="random", keep=0.5, **settings)


@functools.cache
def _model(size: int) -> Any:
    return build("gpt2", vocab_size=size)


PROMPT = prompt(12, seed=1, vocab=250)


def plain(params: SamplingParams) -> RequestOutput:
    return talking().generate(PROMPT, params, compressor=None)[0]


@functools.cache
def free_text() -> RequestOutput:
    return plain(SamplingParams(max_new_tokens=TOKENS, ignore_eos=True))


def collect(ours: Engine, params: SamplingParams) -> tuple[str, tuple[int, ...], RequestOutput]:
    chunks = list(ours.stream(PROMPT, params))
    last = chunks[-1].output
    assert last is not None
    assert all(chunk.output is None for chunk in chunks[:-1])
    return "".join(chunk.text for chunk in chunks), tuple(t for chunk in chunks for t in chunk.token_ids), last


def check(params: SamplingParams) -> RequestOutput:
    expected = plain(params)
    refs = {tuple(PROMPT): free_text().token_ids}
    size = len(tokenizer())
    for drafter in (Oracle(refs, size), Noisy(refs, size), Scripted(refs, size, (0, 5, 2, 1)), lambda request, at, own: own):
        with drafting(drafter):
            (whole,) = talking().generate(PROMPT, params)
            text, ids, streamed = collect(talking(), params)
        for out in (whole, streamed):
            assert (out.text, out.token_ids, out.finish_reason, out.stop_reason, out.logprobs) == (
                expected.text,
                expected.token_ids,
                expected.finish_reason,
                expected.stop_reason,
                expected.logprobs,
            )
        assert (text, ids) == (expected.text, expected.token_ids)
    return expected


@pytest.mark.parametrize("limit", [0, 1, 2, TOKENS])
def test_a_stream_joins_to_the_whole(limit: int) -> None:
    out = check(SamplingParams(max_new_tokens=limit, ignore_eos=True, logprobs=1))
    assert len(out.token_ids) == limit


@pytest.mark.parametrize("width", [2, 3, 6, 11])
@pytest.mark.parametrize("start", [0, 1, 5, 9, 13])
def test_a_stop_string_over_token_boundaries(start: int, width: int) -> None:
    text = free_text().text
    stop = text[start : start + width]
    out = check(SamplingParams(max_new_tokens=TOKENS, ignore_eos=True, stop=(stop,), logprobs=0))
    assert out.text == text[: text.index(stop)]
    assert out.stop_reason == stop
    assert len(out.logprobs or ()) == len(out.token_ids)


def test_of_several_stop_strings_the_earliest_counts() -> None:
    text = free_text().text
    stops = (text[14:17], text[10:16], "never there", text[12:13] + "?")
    out = check(SamplingParams(max_new_tokens=TOKENS, ignore_eos=True, stop=stops))
    assert len(out.text) == min(text.index(stop) for stop in stops if stop in text)


@pytest.mark.parametrize("steps", range(1, 14))
def test_closing_a_stream_gives_everything_back(steps: int) -> None:
    """During prefill, between drafts, before and after a verify: other requests do not notice."""
    ours = talking(full_kv="disk")
    params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True)
    stream, other = ours.stream(prompt(40, vocab=250), params), ours.stream(PROMPT, params)
    for _ in range(2):
        next(other)
    for _ in range(min(steps, 4)):
        next(stream)
    for _ in range(steps):
        ours.loop.step()
    stream.close()
    assert len(ours.loop.requests) <= 1
    rest = [token for chunk in other for token in chunk.token_ids]
    assert tuple(rest) == free_text().token_ids[-len(rest) :]
    assert ours.loop.requests == []
    assert ours.loop.ring.nbytes == 0
    assert not ours.loop.compression.observed


def test_a_stream_that_was_never_started_costs_nothing() -> None:
    ours = talking(full_kv="disk")
    ours.stream(PROMPT, SamplingParams()).close()
    assert not ours.loop.requests


def test_closing_the_engine_ends_open_streams_as_cancelled() -> None:
    ours = talking()
    stream = ours.stream(PROMPT, SamplingParams(max_new_tokens=TOKENS, ignore_eos=True))
    next(stream)
    ours.close()
    last = list(stream)[-1].output
    assert last is not None
    assert last.finish_reason == "cancelled"
    assert last.token_ids == free_text().token_ids[: len(last.token_ids)]


def test_a_failed_stream_raises_after_what_was_right() -> None:
    def bad(prefix: tuple[int, ...], logits: Any) -> Any:
        if len(prefix) == len(PROMPT) + 6:
            raise RuntimeError("boom")
        return logits

    params = SamplingParams(max_new_tokens=TOKENS, ignore_eos=True, logits_processors=(bad,))
    ours = talking()
    got: list[int] = []

    def take() -> None:
        for chunk in ours.stream(PROMPT, params):
            got.extend(chunk.token_ids)

    with pytest.raises(VeriCacheError, match="boom"):
        take()
    assert tuple(got) == free_text().token_ids[: len(got)]
    assert not ours.loop.requests


@pytest.mark.parametrize(
    ("bad", "message"),
    [([], "empty"), ("", "empty"), ([-1], "outside"), ([10**6], "outside"), ([1.5], "token ids"), (7, "text")],
)
def test_bad_prompts_are_refused_before_anything_runs(bad: Any, message: str) -> None:
    ours = talking()
    with pytest.raises(PromptError, match=message):
        ours.generate([PROMPT, bad])
    assert ours.loop.steps == 0
    assert not ours.loop.requests
