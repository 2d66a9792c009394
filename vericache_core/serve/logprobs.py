"""Log probabilities as the two endpoints of the OpenAI API write them, and tokens as text and bytes."""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Sequence
from typing import Any, Final

from vericache_core.runtime.output import TokenLogprobs

LEAST: Final = -9999.0
"""Stands for a probability of nothing: JSON knows no infinity."""
_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """Tokens of a Hugging Face tokenizer one by one; each has bytes, and text only where these are whole characters."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def bytes_of(self, token: int) -> bytes:
        """What a token adds to an answer; of a special one its name."""
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # padding of the vocabulary
            return b""
        if token in self._tokenizer.added_tokens_decoder:
            return str(piece).encode()
        if self._byte_level is not None:
            return bytes(self._byte_level[letter] for letter in piece)
        byte = _BYTE_PIECE.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else str(piece).replace("▁", " ").encode()

    def text(self, token: int) -> str:
        """A token as text; ``bytes:`` and escapes, as OpenAI has it, where it is a part of a character."""
        raw = self.bytes_of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    @functools.cached_property
    def _byte_level(self) -> dict[str, int] | None:
        """Letter -> byte of a vocabulary that writes each byte as a letter; None for any other."""
        letters = _letters()
        pair = [self._tokenizer.convert_tokens_to_ids(letters[byte]) for byte in "é".encode()]
        if None in pair or self._tokenizer.decode(pair) != "é":
            return None
        return {letter: byte for byte, letter in enumerate(letters)}


class LogprobWriter:
    """Writes those of one choice, in as many parts as its answer is sent in.

    Args:
        texts: of the tokenizer.
        chat: as ``/v1/chat/completions`` has them, else as ``/v1/completions``.
    """

    def __init__(self, texts: TokenTexts, chat: bool) -> None:
        self._texts, self._chat = texts, chat
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # characters of the answer before the next token

    def write(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """The next tokens of the choice."""
        if self._chat:
            return {"content": [self._token(entry) for entry in entries], "refusal": None}
        offsets = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._texts.bytes_of(entry.token)))
        return {
            "tokens": [self._texts.text(entry.token) for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [{self._texts.text(token): _finite(value) for token, value in entry.top} for entry in entries],
            "text_offset": offsets,
        }

    def _token(self, entry: TokenLogprobs) -> dict[str, Any]:
        top = [self._one(token, value) for token, value in entry.top]
        return {**self._one(entry.token, entry.logprob), "top_logprobs": top}

    def _one(self, token: int, value: float) -> dict[str, Any]:
        return {"token": self._texts.text(token), "logprob": _finite(value), "bytes": list(self._texts.bytes_of(token))}


def _finite(value: float) -> float:
    return max(value, LEAST)


def _letters() -> list[str]:
    """Letter of each byte in byte-level vocabularies: itself where it can be seen, else one from U+0100 on, in order."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = iter(range(0x100, 0x200))
    return [chr(byte if byte in seen else next(hidden)) for byte in range(256)]
