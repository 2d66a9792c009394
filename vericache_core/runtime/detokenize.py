"""Token ids to text, one token at a time, at a constant cost per token.

Decoding a token alone is wrong (a character may span tokens; some tokenizers eat a leading space), decoding
everything each time is quadratic. So a short window of recent tokens is decoded and what it adds is released,
once it can no longer change. The released pieces joined equal one decode of all ids.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_LONG_WINDOW = 24  # tokens; only invalid bytes keep a window open that long
_SETTLED_CHARS = 4  # each is at least one byte, and a UTF-8 character is at most four


class TextDecoder:
    """What a tokenizer says about turning ids into text, looked up once and shared by all requests.

    Args:
        tokenizer: anything with ``decode(ids)``; the options of Hugging Face tokenizers are used where it has them.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self.skip_special_tokens = skip_special_tokens
        self._decode: Callable[[list[int]], str] = partial(tokenizer.decode, **_options(tokenizer, skip_special_tokens))
        special = {*getattr(tokenizer, "all_special_ids", ()), *getattr(tokenizer, "added_tokens_decoder", ())}
        self.skipped = frozenset(token for token in special if skip_special_tokens and self._decode([token]) == "")
        """Ids that decoding leaves out wherever they stand."""
        self.byte_tokens = _byte_tokens(tokenizer)
        """Ids that stand for one byte in a vocabulary with byte fallback."""

    def __call__(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, decoded at once."""
        return self._decode(list(ids))


class Detokenizer:
    """Incremental decoding of one request's ids.

    Skipped ids never enter the window. A run of byte-fallback ids is decoded as a whole (one bad byte spoils
    the run), so nothing of it is released before it ends.
    """

    def __init__(self, decode: TextDecoder) -> None:
        self._decode = decode
        self._ids: list[int] = []  # all but skipped ones
        self._start = 0  # of the window, which ends with the newest id
        self._known = 0  # the text of ids before here is out; _start <= _known
        self._context = ""  # decode(ids[_start:_known]), the text that only serves to decode the rest in context
        self._shown = 0  # characters of the window's text that are context or released
        self._pieces: list[str] = []
        self._finished = False

    def push(self, token: int) -> str:
        """Add one id; return the text that is now certain, often one token's worth, sometimes none."""
        assert not self._finished, "push after finish"
        if token in self._decode.skipped:
            return ""
        self._ids.append(token)
        if token in self._decode.byte_tokens:
            return ""
        text = self._decode(self._ids[self._start :])
        if len(text) <= len(self._context) or not text.startswith(self._context):
            return ""
        settled = len(text.rstrip(REPLACEMENT))
        if settled == len(text):
            return self._release(text, settled, upto=len(self._ids))
        if len(self._ids) - self._known >= _LONG_WINDOW:
            return self._release_invalid(text)
        return self._release(text, settled)

    def finish(self) -> str:
        """Return the rest, an incomplete character included (as U+FFFD); no more ids can be added."""
        if self._finished:
            return ""
        self._finished = True
        if self._known == len(self._ids):
            return ""
        released, everything = "".join(self._pieces), self._decode(self._ids)
        if everything.startswith(released):
            rest = everything[len(released) :]
        else:  # the decoder changed text that was out already; the window is the best that can be had
            rest = self._decode(self._ids[self._start :])[self._shown :]
        self._pieces.append(rest)
        return rest

    @property
    def text(self) -> str:
        """Everything released so far."""
        return "".join(self._pieces)

    def check_integrity(self) -> None:
        """Raise AssertionError if the window is inconsistent or released text is not a prefix of the whole."""
        assert 0 <= self._start <= self._known <= len(self._ids), "window out of order"
        assert self._context == (self._decode(self._ids[self._start : self._known]) if self._known else ""), "stale context"
        assert self._shown >= len(self._context), "context counted as text"
        assert self._decode(self._ids).startswith(self.text), "released text is not a prefix of the whole"

    def _release(self, text: str, end: int, *, upto: int | None = None) -> str:
        """Release ``text``, the window's, to its character ``end``; with ``upto`` move the window there.

        ``text`` is then the text of the window to id number ``upto``; more than that may be out already.
        """
        piece = text[self._shown : end]
        shown = max(self._shown, end)
        if upto is not None:
            self._start, self._known = self._known, upto
            self._context = self._decode(self._ids[self._start : upto])
            shown += len(self._context) - len(text)
        self._shown = shown
        if piece:
            self._pieces.append(piece)
        return piece

    def _release_invalid(self, text: str) -> str:
        """In a long run of invalid bytes, release what later bytes cannot change.

        A cut is safe where decoding both sides apart gives the same text (inside a character it would not) and
        enough follows it that whatever comes next cannot reach back to it.
        """
        for cut in range(len(self._ids) - _SETTLED_CHARS, self._known, -1):
            tail = self._decode(self._ids[cut:])
            if len(tail) < _SETTLED_CHARS:
                continue
            head = self._decode(self._ids[self._start : cut])
            if head + tail == text and len(head) > len(self._context):
                return self._release(head, len(head), upto=cut)
        return ""


def _options(tokenizer: Any, skip_special_tokens: bool) -> dict[str, bool]:
    """The keyword arguments of ``tokenizer.decode`` that keep its text local and exact."""
    try:
        parameters = inspect.signature(tokenizer.decode).parameters
    except ValueError:  # a compiled function that does not describe itself
        return {}
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    wanted = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
    return {key: value for key, value in wanted.items() if takes_any or key in parameters}


def _byte_tokens(tokenizer: Any) -> frozenset[int]:
    """Ids of the pieces ``<0x00>`` to ``<0xFF>``, where the tokenizer has them."""
    vocab: Callable[[], dict[str, int]] | None = getattr(tokenizer, "get_vocab", None)
    if vocab is None:
        return frozenset()
    return frozenset(token for piece, token in vocab().items() if _BYTE_TOKEN.fullmatch(piece))
