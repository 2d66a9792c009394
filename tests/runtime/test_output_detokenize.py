"""The incremental detokenizer against one decode of everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.toys import PIECES, ByteTokenizer, byte_level_tokenizer, sentencepiece_tokenizer
from vericache_core.runtime.detokenize import REPLACEMENT, Detokenizer, TextDecoder

TOYS = ByteTokenizer([*PIECES, b"END\xe2\x82", b"\xacx\xe2", b"\xff\xf0"], special=[0, 256])
BYTE_LEVEL, SENTENCEPIECE = byte_level_tokenizer(), sentencepiece_tokenizer()
BYTES = st.sampled_from([*"aé日\U0001f600".encode(), 0x80, 0xBF, 0xC3, 0xE2, 0xF0, 0xFF, 0xEF, 0xBD])
TOKENS: dict[str, tuple[Any, st.SearchStrategy[int]]] = {
    "bytes": (TOYS, st.integers(0, len(TOYS.vocab) - 1) | BYTES),
    "byte-level": (BYTE_LEVEL, st.integers(0, len(BYTE_LEVEL) - 1) | st.just(0)),
    "sentencepiece": (
        SENTENCEPIECE,
        st.integers(0, len(SENTENCEPIECE) - 1) | st.integers(257, 264) | BYTES.map(lambda value: value + 1),
    ),
}


def pieces(decode: TextDecoder, ids: Sequence[int], check: bool = True) -> list[str]:
    detokenizer = Detokenizer(decode)
    found = []
    for token in ids:
        found.append(detokenizer.push(token))
        if check:
            detokenizer.check_integrity()
    found.append(detokenizer.finish())
    assert detokenizer.text == "".join(found)
    assert detokenizer.finish() == ""
    return found


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", sorted(TOKENS))
@given(st.data())
def test_pieces_join_to_the_full_decode(kind: str, skip: bool, data: st.DataObject) -> None:
    tokenizer, token = TOKENS[kind]
    ids = data.draw(st.lists(token, max_size=60))
    decode = TextDecoder(tokenizer, skip_special_tokens=skip)
    assert decode(ids) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces(decode, ids)) == decode(ids)


@given(st.text(max_size=40))
def test_valid_text_is_released_character_by_character(text: str) -> None:
    found = pieces(TextDecoder(TOYS), TOYS.encode(text.replace("\0", "")))
    released = found[:-1] if REPLACEMENT not in text else found
    assert "".join(released) == text.replace("\0", "")
    if REPLACEMENT not in text:
        assert [piece for piece in found if piece] == list(text.replace("\0", ""))


def test_incomplete_characters_are_held_back_and_flushed_at_the_end() -> None:
    assert pieces(TextDecoder(TOYS), "é".encode()[:1] + b"") == ["", REPLACEMENT]
    assert pieces(TextDecoder(TOYS), "\U0001f600".encode()) == ["", "", "", "\U0001f600", ""]
    assert pieces(TextDecoder(TOYS), b"\xe2A") == ["", REPLACEMENT + "A", ""]


def test_text_before_an_incomplete_character_in_the_same_token_is_not_held() -> None:
    tokenizer = ByteTokenizer([b"END\xe2\x82", b"\xacx\xe2", b"\xffy"])
    assert pieces(TextDecoder(tokenizer), [256, 257, 258]) == ["END", "€x", 2 * REPLACEMENT + "y", ""]


def test_special_tokens_between_the_bytes_of_a_character() -> None:
    first, second = "é".encode()
    assert pieces(TextDecoder(TOYS), [first, 0, 0, second, 256]) == ["", "", "", "é", "", ""]
    assert pieces(TextDecoder(SENTENCEPIECE), [first + 1, 0, second + 1, 0, 264]) == ["", "", "", "", "é!", ""]


def test_a_bad_byte_spoils_its_run_and_nothing_of_the_run_was_out() -> None:
    ids = [264, *(value + 1 for value in "é".encode()), 0xFF + 1, 264]
    assert SENTENCEPIECE.decode(ids) == "!" + 3 * REPLACEMENT + "!"
    assert pieces(TextDecoder(SENTENCEPIECE), ids) == ["!", "", "", "", 3 * REPLACEMENT + "!", ""]


@pytest.mark.parametrize(
    "token",
    [
        lambda index: 97,
        lambda index: 0x80,
        lambda index: 0,
        lambda index: (0xE2, 0x82)[index % 2],
        lambda index: (0, 0xC3)[index % 2],
        lambda index: (0xE2, 0x82, 256)[index % 3],
    ],
    ids=["letters", "invalid bytes", "special", "cut characters", "special and cut", "whole then invalid"],
)
def test_cost_grows_with_the_number_of_tokens_only(token: Callable[[int], int]) -> None:
    costs = []
    for count in (500, 2000):
        tokenizer = ByteTokenizer([b"\xac\xff"], special=[0])
        decode = TextDecoder(tokenizer)
        ids = [*(token(index) for index in range(count)), 97]  # the letter shows whether the window was cut rightly
        expected = decode(ids)
        tokenizer.decoded_tokens = 0
        assert "".join(pieces(decode, ids, check=False)) == expected
        costs.append(tokenizer.decoded_tokens)
    assert costs[1] <= 5 * costs[0]
    assert costs[1] <= 2000 * 100


def test_tokenizers_that_take_no_options() -> None:
    class Plain:
        def decode(self, ids: list[int]) -> str:
            return "".join(PIECES[token] for token in ids)

    decode = TextDecoder(Plain())
    assert decode([0, 3]) == "ENDSTOP"
    assert "".join(pieces(decode, [0, 5, 6, 3])) == "END éSTOP"
    assert decode.skipped == decode.byte_tokens == frozenset()


def test_what_is_read_from_hugging_face_tokenizers() -> None:
    assert TextDecoder(BYTE_LEVEL).skipped == {0}
    assert TextDecoder(BYTE_LEVEL, skip_special_tokens=False).skipped == frozenset()
    assert TextDecoder(BYTE_LEVEL).byte_tokens == frozenset()
    assert TextDecoder(SENTENCEPIECE).byte_tokens == frozenset(range(1, 257))
