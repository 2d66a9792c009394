"""Drafters for tests: what is proposed is scripted, what is decided is not.

The runtime drafts with compressors only, so these replace each drafted id after the draft step computed it.
The replaced id then runs through the draft KV like any other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from torch import Tensor

from vericache_core.runtime.request import Request

Drafter: TypeAlias = Callable[[Request, int, int], int]
"""``(request, index among the generated tokens, id drafted by the compressed KV) -> id``."""


@contextmanager
def drafting(drafter: Drafter) -> Iterator[None]:
    """Let ``drafter`` decide every drafted id."""
    original = Request.take_draft

    def take_draft(self: Request, logits: Tensor) -> None:
        original(self, logits)
        at = len(self.generated) + len(self.drafts) - 1
        self.drafts[-1] = drafter(self, at, self.drafts[-1])

    Request.take_draft = take_draft  # type: ignore[method-assign]
    try:
        yield
    finally:
        Request.take_draft = original  # type: ignore[method-assign]


References: TypeAlias = Mapping[tuple[int, ...], Sequence[int]]
"""Prompt -> the tokens that plain decoding gives."""


class Replay:
    """Base of the drafters that know the right answer.

    Args:
        references: right tokens by prompt.
        vocab: size of the vocabulary.
    """

    def __init__(self, references: References, vocab: int) -> None:
        self.references, self.vocab = references, vocab

    def right(self, request: Request, at: int) -> int:
        tokens = self.references[tuple(request.tokens[: request.prompt_tokens])]
        return tokens[at] if at < len(tokens) else 0

    def wrong(self, request: Request, at: int) -> int:
        return (self.right(request, at) + 1) % self.vocab


class Oracle(Replay):
    """Everything is accepted."""

    def __call__(self, request: Request, at: int, drafted: int) -> int:
        return self.right(request, at)


class AntiOracle(Replay):
    """Nothing is accepted."""

    def __call__(self, request: Request, at: int, drafted: int) -> int:
        return self.wrong(request, at)


class Noisy(Replay):
    """Three in ten are wrong."""

    def __call__(self, request: Request, at: int, drafted: int) -> int:
        chance = random.Random(f"{request.tokens[0]} {at} {len(request.drafts)}").random()
        return self.wrong(request, at) if chance < 0.3 else self.right(request, at)


class Scripted(Replay):
    """Accepts the given number of drafts in each round; requests of a batch take the script up at different places."""

    def __init__(self, references: References, vocab: int, lengths: Sequence[int]) -> None:
        super().__init__(references, vocab)
        self.lengths = lengths
        self._rounds: dict[int, list[int]] = {}

    def __call__(self, request: Request, at: int, drafted: int) -> int:
        starts = self._rounds.setdefault(request.number, [])
        if len(request.drafts) == 1 and (not starts or starts[-1] != at):
            starts.append(at)
        number = len(starts) - 1 + sorted(self._rounds).index(request.number)
        accepted = at - starts[-1] < self.lengths[number % len(self.lengths)]
        return self.right(request, at) if accepted else self.wrong(request, at)
