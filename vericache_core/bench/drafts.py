"""What a compressed prefix drafts, measured without waiting for the runtime to meet each case.

While drafts agree with the full KV, drafting freely and drafting along the right tokens are the same thing. So one
block of the right tokens, run through the compressed prefix, tells how far a draft from its beginning gets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vericache_core.cache.draft import DraftKV
from vericache_core.engine import Engine
from vericache_core.runtime.backend import choose_attention
from vericache_core.runtime.request import Request, Want
from vericache_core.runtime.segments import Segment
from vericache_core.runtime.tile import run_tile

Rows = Sequence[tuple[Tensor, Tensor]]
BLOCK = 32
"""Tokens in a block: the widest window."""
STRIDE = 8
"""Generated tokens between two starts of a draft."""


class Drafts:
    """Drafts of one compressed prefix.

    Args:
        engine: whose model drafts.
        request: its full KV holds the prompt's rows; its ``draft`` is set for each measurement.
        tokens: what the full KV generated.
        rows: exact rows of ``tokens``, the newest one excepted, per layer.
    """

    def __init__(self, engine: Engine, request: Request, tokens: Sequence[int], rows: Rows) -> None:
        self.engine, self.request, self.tokens, self.rows = engine, request, list(tokens), rows
        _, self._attend = choose_attention(engine.attention, engine.adapter.device)

    def first_difference(self, draft: DraftKV) -> tuple[int | None, Tensor]:
        """Where decoding with the compressed prefix alone first differs from ``tokens``, and the logits up to there.

        The first token is the full KV's and the rest are drafts, each behind the drafts before it; as long as they
        agree these are the right tokens. So blocks of the right tokens tell, and nothing is drafted token by token.
        Returns at least the block that a draft of the widest window makes, unless the tokens end before.
        """
        parts, found = [], None
        for first in range(0, len(self.tokens) - 1, BLOCK):
            inputs = self.tokens[first : min(first + BLOCK, len(self.tokens) - 1)]
            parts.append(self._run(draft, inputs))
            wrong = _disagreements(parts[-1], self.tokens[first + 1 :])
            if wrong:
                found = first + 1 + wrong[0]
                break
        draft.retract()
        return found, torch.cat(parts) if parts else torch.empty(0)

    def free(self, draft: DraftKV, different: int | None, ends: Sequence[int]) -> list[int]:
        """What greedy decoding with the compressed prefix alone writes: the first token is the full KV's, the rest drafts.

        ``different`` is where it first differs. Up to there the right tokens are its own and run in blocks.
        """
        if different is None:
            return list(self.tokens)
        found = self.tokens[:different]
        logits = self._run(draft, found)
        found.append(self.request.chooser.draft(logits[-1], found))
        while len(found) < self.request.params.max_new_tokens and found[-1] not in ends:
            logits = self._run(draft, found[-1:])
            found.append(self.request.chooser.draft(logits[-1], found))
        draft.retract()
        return found

    def along(self, draft: DraftKV, first: Tensor) -> list[Tensor]:
        """Logits ``[up to BLOCK, vocab]`` of drafts that start after each of the generated tokens 0, 8, 16, ...

        Row ``i`` of the block that starts at token ``j`` proposes token ``j + 1 + i``; the tail before ``j`` is exact.
        ``first`` is what :meth:`first_difference` returned: its beginning is the first block.
        """
        blocks = []
        for start in range(0, len(self.tokens) - 1, STRIDE):
            inputs = self.tokens[start : min(start + BLOCK, len(self.tokens) - 1)]
            blocks.append(first[: len(inputs)] if start == 0 else self._run(draft, inputs))
            draft.retract()
            self._accept(draft, start, min(start + STRIDE, len(self.tokens) - 1))
        return blocks

    def _run(self, draft: DraftKV, tokens: Sequence[int]) -> Tensor:
        """Run ``tokens`` as provisional rows; returns ``[tokens, vocab]``."""
        adapter, parts = self.engine.adapter, []
        self.request.draft = draft
        for first in range(0, len(tokens), adapter.rows):
            block = tuple(tokens[first : first + adapter.rows])
            segment = Segment(self.request, Want("draft", block, draft.tokens), 0, len(block))
            parts.append(run_tile(adapter, [segment], self._attend, lambda *_: None)[: len(block)].clone())
            draft.advance(len(block))
        self.request.draft = None
        return torch.cat(parts)

    @torch.inference_mode()  # pages may have been made inside of it, and can then be written nowhere else
    def _accept(self, draft: DraftKV, start: int, stop: int) -> None:
        """Append the exact rows of generated tokens ``start:stop`` to both caches."""
        full, count = self.request.full, stop - start
        for layer in full.layers:
            keys, values = self.rows[layer.index]
            part = slice(start, stop)
            full.device_pages(layer.index).write(full.device_pages(layer.index).lengths, keys[:, part], values[:, part])
            if layer.index in draft.compressed_layers():
                pages, base, _ = draft.layer(layer.index)
                pages.write(base, keys[:, part], values[:, part])
        full.advance(count)
        draft.accept(count)


def accepted_runs(blocks: Sequence[Tensor], tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Per start ``(drafts that agree before the first that does not, drafts made)``; ties go to the lowest id."""
    runs = []
    for number, logits in enumerate(blocks):
        wrong = _disagreements(logits, tokens[number * STRIDE + 1 :])
        runs.append((wrong[0] if wrong else len(logits), len(logits)))
    return runs


def _disagreements(logits: Tensor, tokens: Sequence[int]) -> list[int]:
    """Rows whose greedy choice is not the token at their place."""
    best = logits.float().cpu()
    chosen = (best == best.amax(-1, keepdim=True)).int().argmax(-1)
    wrong: list[int] = torch.nonzero(chosen != torch.tensor(tokens[: len(logits)])).flatten().tolist()
    return wrong


def accepted_mean(runs: Sequence[tuple[int, int]], window: int) -> float | None:
    """Mean accepted run when ``window`` tokens are drafted, over starts with so many left; ``None`` without any."""
    whole = [min(run, window) for run, made in runs if made >= window]
    return sum(whole) / len(whole) if whole else None


def hazard(runs: Sequence[tuple[int, int]], window: int | None = None) -> float | None:
    """Chance per draft of being the first that is wrong: failures over drafts that were at risk.

    With ``window`` of its first drafts only, over the starts that :func:`accepted_mean` counts.
    """
    chosen = runs if window is None else [(min(run, window), window) for run, made in runs if made >= window]
    failures = sum(run < made for run, made in chosen)
    at_risk = sum(min(run + 1, made) for run, made in chosen)
    return failures / at_risk if at_risk else None


def divergence(blocks: Sequence[Tensor], full_logits: Tensor) -> float | None:
    """Mean KL(full || lossy) per token in nats, over the drafts nearest to their start so that each token counts once.

    ``full_logits`` is ``[tokens, vocab]``, row ``t`` behind generated token ``t``.
    """
    parts = []
    for number, logits in enumerate(blocks):
        near = logits[:STRIDE].float().cpu()
        first = number * STRIDE + 1
        full = torch.log_softmax(full_logits[first : first + len(near)].double(), -1)
        lossy = torch.log_softmax(near.double(), -1)
        parts.append((full.exp() * (full - lossy)).sum(-1))
    return max(0.0, float(torch.cat(parts).mean())) if parts else None
