"""OutputBuffer: where an output ends and what its text is, against a naive token-by-token reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.toys import PIECES, ByteTokenizer, sentencepiece_tokenizer, speculate, toy_logits
from vericache_core.errors import ConfigError, VeriCacheError
from vericache_core.runtime.choose import Choice, TokenChooser
from vericache_core.runtime.detokenize import REPLACEMENT, TextDecoder
from vericache_core.runtime.output import OutputBuffer, TokenLogprobs
from vericache_core.runtime.sampling_params import SamplingParams

TOY = ByteTokenizer([*PIECES, b"END\xe2\x82", b"\xacab\xc3"])
PLAIN = TextDecoder(TOY)
PIECE = {piece: TOY.piece(piece) for piece in ("END", "ST", "OP", "STOP", "xENDy", " ", "é", "日本", "ab", "ba", "aab")}


@dataclass
class Result:
    """What a run came to."""

    ids: list[int]
    text: str
    reason: str | None
    stop_reason: int | str | None
    deltas: list[str] = field(default_factory=list, compare=False)


def run(params: SamplingParams, ids: Sequence[int], eos: Sequence[int] = (), tokenizer: Any = PLAIN, every: int = 1) -> Result:
    """Commit until finished, looking at the delta after every ``every`` tokens."""
    buffer = OutputBuffer(params, eos, tokenizer)
    buffer.check_integrity()
    deltas = []
    for committed, token in enumerate(ids, 1):
        if buffer.finished:
            break
        assert buffer.commit(Choice(token, 0.0)) == buffer.finish_reason
        buffer.check_integrity()
        if committed % every == 0:
            deltas.append(buffer.take_delta())
    if not buffer.finished:
        buffer.close()
        buffer.check_integrity()
    deltas.append(buffer.take_delta())
    assert "".join(deltas) == buffer.text
    assert buffer.take_delta() == ""
    return Result(buffer.token_ids, buffer.text, buffer.finish_reason, buffer.stop_reason, deltas)


def settled(ids: Sequence[int], final: bool) -> str:
    """The naive text after some tokens: everything decoded, an incomplete character left out until the end."""
    text = PLAIN(ids)
    return text if final or not text.endswith(REPLACEMENT) else text[:-1]


def naive(params: SamplingParams, ids: Sequence[int], eos: Sequence[int]) -> Result:
    """Full decode and find at each step."""
    ending = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
    immune, used = 0, 0
    if params.max_new_tokens == 0:
        return Result([], "", "length", None)
    for count in range(1, len(ids) + 1):
        may_stop = count >= params.min_new_tokens
        ends, last = ids[count - 1] in ending and may_stop, count == params.max_new_tokens
        used = count - 1 if ends else count
        text = settled(ids[:used], ends or last or count == len(ids))
        if not may_stop:
            immune = len(settled(ids[:used], False))
        matches = [
            (begin, len(stop), stop)
            for stop in params.stop
            for begin in range(len(text))
            if may_stop and text.startswith(stop, begin) and begin + len(stop) > immune
        ]
        if matches:
            begin, _, stop = min(matches)
            return Result(list(ids[:count]), text[:begin], "stop", stop)
        if ends:
            return Result(list(ids[:count]), text, "stop", ids[count - 1])
        if last:
            return Result(list(ids[:count]), text, "length", None)
    return Result(list(ids), settled(ids, True), "cancelled", None)


PROSE = [*PIECE.values(), *b"ENDSTOPab", *"é日".encode(), len(TOY.vocab) - 1, len(TOY.vocab) - 2]
STOPS = st.lists(
    st.sampled_from(["END", "STOP", "b", "aba", "abab", "baa", "aab", " é", "日", "本", "Da", "T", "éé"]), max_size=3
)


@st.composite
def requests(draw: st.DrawFn) -> SamplingParams:
    longest = draw(st.integers(0, 40))
    return SamplingParams(
        max_new_tokens=longest,
        min_new_tokens=min(draw(st.integers(0, 12)), longest),
        stop=tuple(draw(STOPS)),
        stop_token_ids=tuple(draw(st.lists(st.sampled_from(PROSE), max_size=1))),
        ignore_eos=draw(st.booleans()),
    )


@given(
    requests(), st.lists(st.sampled_from(PROSE), max_size=40), st.lists(st.sampled_from(PROSE), max_size=2), st.integers(2, 8)
)
def test_equals_the_naive_reference(params: SamplingParams, ids: list[int], eos: list[int], every: int) -> None:
    expected = naive(params, ids, eos)
    assert run(params, ids, eos) == expected
    assert run(params, ids, eos, every=every) == expected
    assert run(dataclasses.replace(params, stop=params.stop[::-1]), ids, eos) == expected


@given(st.lists(st.sampled_from([97, 98, *PIECE.values()]), max_size=30), STOPS)
def test_a_delta_never_has_to_be_taken_back(ids: list[int], stop: list[str]) -> None:
    """At every step, what was streamed is a prefix of the final text for whatever tokens could follow."""
    params = SamplingParams(max_new_tokens=100, stop=tuple(stop))
    buffer = OutputBuffer(params, [], PLAIN)
    for count, token in enumerate(ids, 1):
        if buffer.commit(Choice(token, 0.0)) is not None:
            break
        text = PLAIN(ids[:count])
        assert text.startswith(buffer.text)
        for candidate in stop:
            for length in range(1, len(candidate)):
                if text.endswith(candidate[:length]):
                    assert len(buffer.text) <= len(text) - length


@pytest.mark.parametrize("position", range(12))
def test_eos_at_every_position_of_an_accepted_block(position: int) -> None:
    """The token at each position in turn is declared EOS; an oracle drafts seven at a time."""
    vocab, tokens, prompt = 64, 12, (1, 2)
    model = toy_logits(vocab)
    plain = SamplingParams(max_new_tokens=tokens)
    truth = [
        choice.token
        for choice in speculate(
            TokenChooser(plain, prompt, [], vocab), model, prompt, lambda past, own: own, tokens=tokens, window=1
        )
    ]
    eos = truth[position]
    expected = truth[: truth.index(eos) + 1]
    for pair in ([eos], [eos, vocab - 1], [vocab - 1, eos]):
        buffer = OutputBuffer(plain, pair, PLAIN)
        chooser = TokenChooser(plain, prompt, pair, vocab)

        def done(choice: Choice, buffer: OutputBuffer = buffer) -> bool:
            return buffer.commit(choice) is not None

        speculate(
            chooser, model, prompt, lambda past, own: truth[min(len(past), tokens - 1)], tokens=tokens, window=7, stop=done
        )
        assert buffer.token_ids == expected
        assert (buffer.finish_reason, buffer.stop_reason) == ("stop", eos)
        assert buffer.text == PLAIN(expected[:-1])


def test_a_drafted_eos_that_is_rejected_does_not_end_anything() -> None:
    vocab, prompt, eos = 16, (1, 2), 3
    params = SamplingParams(max_new_tokens=20, bad_words=((5,),))
    choosers = [TokenChooser(params, prompt, [eos], vocab) for _ in range(2)]

    def model(prefix: Sequence[int]) -> Any:
        logits = toy_logits(vocab)(prefix)
        logits[eos] = -50.0
        return logits

    truth = speculate(choosers[0], model, prompt, lambda past, own: own, tokens=20, window=1)
    buffer = OutputBuffer(params, [eos])
    speculate(
        choosers[1],
        model,
        prompt,
        lambda past, own: eos,
        tokens=20,
        window=4,
        stop=lambda choice: buffer.commit(choice) is not None,
    )
    assert buffer.token_ids == [choice.token for choice in truth]
    assert buffer.finish_reason == "length"


def test_eos_that_is_also_the_padding_or_a_stop_id() -> None:
    assert run(SamplingParams(stop_token_ids=(97,)), [98, 97, 98], [97]) == Result([98, 97], "b", "stop", 97)
    ignored = SamplingParams(ignore_eos=True, max_new_tokens=3)
    assert run(ignored, [98, 97, 98], [97]) == Result([98, 97, 98], "bab", "length", None)


def test_eos_comes_before_length_and_length_ends_exactly() -> None:
    assert run(SamplingParams(max_new_tokens=2), [97, 98], [98]) == Result([97, 98], "a", "stop", 98)
    assert run(SamplingParams(max_new_tokens=1), [97, 98], [98]) == Result([97], "a", "length", None)
    assert run(SamplingParams(max_new_tokens=0), [97]) == Result([], "", "length", None)


def test_special_eos_text_is_left_out_or_kept() -> None:
    tokenizer = ByteTokenizer(special=[256])
    assert run(SamplingParams(), [97, 256], [256], tokenizer).text == "a"
    assert run(SamplingParams(), [97, 256], [256], TextDecoder(tokenizer, skip_special_tokens=False)).text == "aEND"
    assert run(SamplingParams(ignore_eos=True), [97, 256, 98], [256], tokenizer).text == "ab"


@pytest.mark.parametrize(
    "split", [["S", "TOP"], ["ST", "OP"], ["S", "T", "OP"], ["S", "T", "O", "P"], ["xST", "OPy"], ["STOP"]]
)
@pytest.mark.parametrize("before", range(5))
def test_stop_strings_span_tokens(split: list[str], before: int) -> None:
    tokenizer = ByteTokenizer(split)
    ids = [97] * before + [256 + index for index in range(len(split))] + [98, 98]
    found = run(SamplingParams(stop=("STOP",)), ids, tokenizer=tokenizer)
    assert found.text == "a" * before + ("x" if split[0].startswith("x") else "")
    assert found.ids == ids[:-2], "the tokens up to the one that completes the match are kept"
    assert (found.reason, found.stop_reason) == ("stop", "STOP")


def test_the_earliest_of_two_stops_wins_whatever_their_order() -> None:
    ids = [97, PIECE["xENDy"], PIECE["STOP"]]
    for stop in (("STOP", "END"), ("END", "STOP")):
        assert run(SamplingParams(stop=stop), ids) == Result(ids[:2], "ax", "stop", "END")
    one_token = ByteTokenizer(["aSTOPbENDc"])
    for stop in (("STOP", "END"), ("END", "STOP")):
        assert run(SamplingParams(stop=stop), [256], tokenizer=one_token) == Result([256], "a", "stop", "STOP")
    for stop in (("STOP", "ST"), ("ST", "STOP")):
        assert run(SamplingParams(stop=stop), [256], tokenizer=one_token).stop_reason == "ST"


def test_a_false_start_is_released_and_an_overlapping_one_is_found() -> None:
    found = run(SamplingParams(stop=("aab",)), [*b"aaXaaab"])
    assert found.text == "aaXa"
    assert found.deltas[:4] == ["", "", "aaX", ""]
    assert run(SamplingParams(stop=("STOP",)), [*b"xSTO"]).text == "xSTO", "what was held is text in the end"


def test_the_longest_beginning_of_any_stop_is_held() -> None:
    for stop in (("abab", "bX"), ("bX", "abab")):
        found = run(SamplingParams(stop=stop), [97, 98, 97, 98])
        assert (found.text, found.deltas) == ("", ["", "", "", "", ""])


def test_stop_inside_a_multibyte_character() -> None:
    ids = [*"a日本".encode(), 98]
    assert run(SamplingParams(stop=("日",)), ids) == Result(ids[:4], "a", "stop", "日")
    assert run(SamplingParams(stop=("本",)), ids) == Result(ids[:7], "a日", "stop", "本")
    half = run(SamplingParams(stop=(REPLACEMENT,)), ids)
    assert half.text == "a日本b", "an incomplete character is not a replacement character"
    cut = run(SamplingParams(stop=("本",), max_new_tokens=6), ids)
    assert (cut.text, cut.reason) == ("a日" + REPLACEMENT, "length")


def test_a_stop_string_that_the_flush_completes() -> None:
    tokenizer = sentencepiece_tokenizer()
    ids = [260, *(value + 1 for value in "日".encode())]
    assert run(SamplingParams(stop=("日",), max_new_tokens=4), ids, tokenizer=tokenizer) == Result(ids, "e", "stop", "日")
    assert run(SamplingParams(stop=("日",)), [*ids, 0], [0], tokenizer).text == "e"


def test_min_new_tokens_holds_off_ids_and_strings() -> None:
    ids = [*b"STOPxSTOPy"]
    held_off = SamplingParams(stop=("STOP",), min_new_tokens=5)
    assert run(held_off, ids) == Result(ids[:9], "STOPx", "stop", "STOP")
    just = SamplingParams(stop=("STOP",), min_new_tokens=4)
    assert run(just, ids) == Result(ids[:4], "", "stop", "STOP")
    assert run(SamplingParams(min_new_tokens=3), [97, 98, 97, 98], [97]) == Result([97, 98, 97], "ab", "stop", 97)


def test_min_new_tokens_masks_the_ending_ids_in_the_chooser() -> None:
    params = SamplingParams(min_new_tokens=3, stop_token_ids=(5,))
    chooser = TokenChooser(params, [1], [3, 4], 16)
    logits = toy_logits(16)([1])
    logits[3], logits[4], logits[5] = 30.0, 20.0, 10.0
    assert chooser.choose(logits, [1, 1]).token not in (3, 4, 5)
    assert chooser.draft(logits, [1, 1]) not in (3, 4, 5)
    assert chooser.choose(logits, [1, 1, 1]).token == chooser.draft(logits, [1, 1, 1]) == 3


def test_logprobs_keep_every_committed_token() -> None:
    params = SamplingParams(stop=("STOP",), logprobs=1)
    buffer = OutputBuffer(params, [], PLAIN)
    for token in b"STOP":
        buffer.commit(Choice(token, 0.0, -0.5, ((token, -0.5),)))
    assert buffer.text == ""
    assert buffer.logprobs == [TokenLogprobs(token, -0.5, ((token, -0.5),)) for token in b"STOP"]
    assert OutputBuffer(SamplingParams(), [], PLAIN).logprobs is None
    with pytest.raises(VeriCacheError, match="carries none"):
        OutputBuffer(params, [], PLAIN).commit(Choice(1, 0.0))


def test_without_a_tokenizer_there_are_ids_and_no_text() -> None:
    assert run(SamplingParams(max_new_tokens=2), [5, 6, 7], tokenizer=None) == Result([5, 6], "", "length", None)
    with pytest.raises(ConfigError, match="need a tokenizer"):
        OutputBuffer(SamplingParams(stop=("x",)), [])


def test_a_finished_request_takes_no_more_tokens_and_cannot_be_finished_again() -> None:
    buffer = OutputBuffer(SamplingParams(), [], PLAIN)
    buffer.commit(Choice(97, 0.0))
    buffer.close("error")
    buffer.close()
    assert (buffer.finish_reason, buffer.text) == ("error", "a")
    with pytest.raises(VeriCacheError, match="finished"):
        buffer.commit(Choice(97, 0.0))
