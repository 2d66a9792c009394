"""JSON by grammar: masks that leave the tokens with which an answer stays valid, by llguidance.

A mask is a function of the committed tokens alone, and the full KV's choice is made through it, so an answer is the same
with drafts and without. Drafts are made without it: where the model alone would leave the form, they cost a round.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from vericache_core.errors import UsageError, VeriCacheError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_SPACE: Final = r"[ \n\r\t]{0,40}"
"""Between the parts of JSON; bounded, as small models lose themselves in white space otherwise."""


class Grammars:
    """Makes masks for the vocabulary of one model.

    Args:
        tokenizer: a fast one of Hugging Face.
        vocab_size: of the logits.
        ending: ids that end an answer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, ending: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._ending = tokenizer, vocab_size, list(ending)

    def json(self, schema: dict[str, Any]) -> JsonMask:
        """A mask that lets only JSON of ``schema`` through.

        Raises:
            UsageError: the schema is none, or asks for what cannot be enforced; or this cannot be done here at all.
        """
        if importlib.util.find_spec("llguidance") is None:
            raise _not_served("llguidance is not installed here", "pip install 'vericache[json]'")
        if not self._ending:
            raise _not_served("the model has no token that ends an answer")
        from llguidance import LLMatcher

        grammar = LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _SPACE})
        wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, self._vocabulary)
        if wrong or messages:
            raise UsageError("response_format: the schema cannot be enforced", cause="; ".join(messages))
        return JsonMask(self._vocabulary, grammar, self._vocab_size)

    @functools.cached_property
    def _vocabulary(self) -> LLTokenizer:
        from llguidance.hf import from_tokenizer

        try:
            return from_tokenizer(self._tokenizer, self._vocab_size, self._ending)
        except ValueError as error:
            raise _not_served(str(error)) from error


class JsonMask:
    """A logits processor of one answer: it follows the committed tokens and masks what the grammar does not take next."""

    def __init__(self, vocabulary: LLTokenizer, grammar: str, vocab_size: int) -> None:
        from llguidance import LLMatcher
        from llguidance.numpy import allocate_token_bitmask

        self._made_of = (vocabulary, grammar, vocab_size)
        self._matcher = LLMatcher(vocabulary, grammar)
        self._bits = allocate_token_bitmask(1, vocab_size)
        self._followed: int | None = None  # tokens of prompt and answer that it knows; None before the first

    def clone(self) -> JsonMask:
        """A fresh one, for another answer."""
        return JsonMask(*self._made_of)

    def __call__(self, prefix: tuple[int, ...], logits: Tensor) -> Tensor:
        """``logits`` ``[vocab]`` with -inf for what may not come behind ``prefix``; the first prefix is the prompt."""
        from llguidance.numpy import fill_next_token_bitmask

        fresh = prefix[len(prefix) if self._followed is None else self._followed :]
        self._followed = len(prefix)
        if not self._matcher.consume_tokens(list(fresh)):
            raise VeriCacheError("an answer left its grammar", cause=self._matcher.get_error())
        fill_next_token_bitmask(self._matcher, self._bits)
        allowed = np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: len(logits)].astype(bool)
        return logits.masked_fill(~torch.from_numpy(allowed), float("-inf"))


def _not_served(cause: str, hint: str | None = None) -> UsageError:
    return UsageError("response_format is not served", cause=cause, hint=hint)
