"""A small model that proposes: it reads the same tokens as the target, in a KV of its own, and proposes the next ones.

Nothing it does is authoritative, so its steps may have any shape, and what it raises ends its proposals only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from vericache_core.cache.pages import PAGE
from vericache_core.config import EngineConfig
from vericache_core.errors import ConfigError, NonFiniteError, UnsupportedModelError
from vericache_core.model.adapter import ModelAdapter
from vericache_core.model.load import load_model
from vericache_core.model.probe import Attend, Sequence1, run_blocks
from vericache_core.runtime.propose import Length, Proposer

MOST: Final = 10
"""Tokens proposed at a time."""
LONGEST_REST: Final = 64
"""Chances to propose that are let pass at most after failures."""
Choose = Callable[[Tensor, Sequence[int]], int]
"""``(logits [vocab], generated tokens) -> token``, as the request drafts: with its temperature, noise and penalties."""


class Assistant:
    """The model, shared by the requests of an engine.

    Args:
        model: a ``transformers`` causal LM.
        attend: fixed-block attention in use.
        rows: rows of the target's steps.
        pack_weights: as for the target.
        vocab_size: of the target.

    Raises:
        ConfigError: the model cannot be run here.
    """

    def __init__(self, model: Any, attend: Attend, rows: int, pack_weights: str, vocab_size: int) -> None:
        try:
            self.adapter = ModelAdapter(model, rows, pack_weights)
        except UnsupportedModelError as error:
            raise ConfigError(f"the assistant model cannot be used: {error.message}", cause=error.cause) from error
        # Proposals need no bits of one shape, and most steps carry one row.
        self.adapter.shapes = tuple(sorted({1, 2, 4, 8, rows, 4 * rows}))
        self._attend, self._vocab = attend, vocab_size
        self.token_bytes = sum(layer.token_bytes for layer in self.adapter.layers)

    def run(self, sequence: Sequence1, ids: Sequence[int]) -> Tensor:
        """Append rows for ``ids`` to ``sequence``; returns the logits ``[vocab of the target]`` behind the last."""
        row: Tensor | None = None
        for start in range(0, len(ids), self.adapter.most_rows):
            block = ids[start : start + self.adapter.most_rows]
            (rows,) = run_blocks(self.adapter, self._attend, [(sequence, block)])
            sequence.advance(len(block))
            row = rows[-1]
        assert row is not None
        # Models of one tokenizer may pad their vocabulary to different sizes.
        if len(row) >= self._vocab:
            return row[: self._vocab]
        return torch.nn.functional.pad(row, (0, self._vocab - len(row)), value=float("-inf"))


class AssistantProposer(Proposer):
    """One request's side of it.

    Its KV stands for some tokens; what it shares with the sequence to be continued stays, the rest is rolled back, so
    commits and rejections need no telling. While its proposals fail altogether it rests, twice as long each time.

    Args:
        assistant: the model.
        choose: draws tokens as the request drafts them, so that sampled tokens can be hit, too.
        prompt_tokens: tokens before the first generated one.
        clock: seconds.
    """

    def __init__(
        self, assistant: Assistant, choose: Choose, prompt_tokens: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._assistant, self._choose, self._prompt_tokens, self._clock = assistant, choose, prompt_tokens, clock
        self._length = Length(MOST)
        self._misses = self._rest = 0
        self._seconds_per_draft = 0.0
        self.close()

    def follow(self, tokens: Sequence[int], count: int) -> None:
        """See the base. One step at most, so that a prompt that was there already holds nobody up for long."""
        keep = min(self._shared(tokens, ()), count)
        most = min(count, keep + self._assistant.adapter.most_rows, self._limit())
        if most > keep:
            self._take(tokens[:most], keep)

    def propose(self, tokens: Sequence[int], drafts: Sequence[int], most: int) -> list[int]:
        """See the base.

        Raises:
            NonFiniteError: its logits are of no use.
        """
        count = min(most, self._length.value, self._limit() - len(tokens) - len(drafts))
        if count <= 0:
            return []
        if self._rest:
            self._rest -= 1
            self._measured(0.0, count)
            return []
        shared = self._shared(tokens, drafts)
        if len(tokens) - shared > self._assistant.adapter.most_rows:
            self.follow(tokens, len(tokens))
            return []
        started = self._clock()
        found: list[int] = []
        sequence = [*tokens, *drafts]
        # The last token runs in any case: its logits are what is asked for.
        logits = self._take(sequence, min(shared, len(sequence) - 1))
        while True:
            found.append(self._choose(logits, [*sequence[self._prompt_tokens :], *found]))
            if len(found) == count:
                break
            logits = self._take([*self._known, found[-1]], len(self._known))
        self._measured(self._clock() - started, count)
        return found

    def told(self, proposed: int, accepted: int) -> None:
        """See the base."""
        self._length.told(proposed, accepted)
        self._misses = 0 if accepted else self._misses + 1
        self._rest = min(LONGEST_REST, (1 << min(self._misses, 30)) - 1)

    def seconds(self, drafts: int) -> float:
        """See the base."""
        return drafts * self._seconds_per_draft

    @property
    def device_bytes(self) -> int:
        """See the base."""
        return sum(pages.nbytes for pages in self._rows.pages)

    def holds(self, tokens: int) -> float:
        """See the base."""
        return float((tokens + PAGE) * self._assistant.token_bytes)

    def close(self) -> None:
        """See the base."""
        self._rows = Sequence1(self._assistant.adapter)
        self._known: list[int] = []
        self._certain = 0

    def _take(self, sequence: Sequence[int], keep: int) -> Tensor:
        """Make the KV stand for ``sequence``, of which ``keep`` leading rows are right; returns the newest logits."""
        if keep < len(self._known):
            self._rows.rollback(keep)
            del self._known[keep:]
            self._certain = min(self._certain, keep)
        logits = self._assistant.run(self._rows, sequence[keep:])
        self._known += sequence[keep:]
        if bool(torch.isnan(logits).any()):
            raise NonFiniteError("the logits of the assistant model hold NaN")
        return logits

    def _shared(self, tokens: Sequence[int], drafts: Sequence[int]) -> int:
        """Length of what the KV has in common with ``tokens`` and ``drafts``; ``tokens`` only grow and never change."""
        known = self._known
        while self._certain < min(len(known), len(tokens)) and known[self._certain] == tokens[self._certain]:
            self._certain += 1
        shared = self._certain
        if shared == len(tokens):
            for one, other in zip(known[shared:], drafts, strict=False):
                if one != other:
                    break
                shared += 1
        return shared

    def _limit(self) -> int:
        """Tokens that the model can stand for."""
        most = self._assistant.adapter.max_positions
        return 1 << 62 if most is None else most

    def _measured(self, seconds: float, drafts: int) -> None:
        self._seconds_per_draft += 0.1 * (seconds / drafts - self._seconds_per_draft)


def load_assistant(
    config: EngineConfig, given: tuple[Any, Any] | None, target: ModelAdapter, tokenizer: Any, attend: Attend
) -> Assistant:
    """The assistant of an engine over ``target``: the ``given`` model with its tokenizer, or the one that ``config`` names.

    Raises:
        ConfigError: there is none, or it cannot be used with the target.
    """
    if given is None and config.assistant is None:
        raise ConfigError('proposer="assistant" needs a model', hint="name one: assistant=NAME")
    model, its_tokenizer = given or load_model(str(config.assistant), target.dtype, str(target.device))
    made = Assistant(model, attend, config.rows, config.pack_weights, target.vocab_size)
    check_vocabulary(tokenizer, its_tokenizer, target.vocab_size, made.adapter.vocab_size)
    return made


def check_vocabulary(ours: Any, theirs: Any, our_size: int, their_size: int) -> None:
    """Check that an assistant writes tokens as the target does.

    ``ours`` and ``theirs`` are the tokenizers of target and assistant, None where a model came without one; then the
    widths of their logits decide.

    Raises:
        ConfigError: it does not.
    """
    hint = "take an assistant of the same model family"
    if ours is None or theirs is None:
        if our_size != their_size:
            cause = f"{their_size} tokens, and the model has {our_size}; without tokenizers nothing else can be compared"
            raise ConfigError("the assistant model has another vocabulary", cause=cause, hint=hint)
        return
    own, other = ours.get_vocab(), theirs.get_vocab()
    if own != other:
        example = min((text for text in own.keys() | other.keys() if own.get(text) != other.get(text)), key=repr)
        cause = (
            f"{len(other)} tokens there, {len(own)} here; {example!r} is {other.get(example)} there and {own.get(example)} here"
        )
        raise ConfigError("the assistant model has another vocabulary", cause=cause, hint=hint)
