"""The scoring passes: which tokens are run after the prefix, and what is read off them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vericache_core import CompressContext, LayerDescriptor, PrefixView
from vericache_core.compressor import require_finite
from vericache_core.errors import CompressorFault

REPEAT_ALL = "\n\nRepeat the previous context exactly."
REPEAT_PART = "\n\nRepeat the part of the previous context exactly, starting with "
LEAD_IN = 8
"""Tokens of the previous chunk that tell the model where to start."""


@dataclass(frozen=True)
class Texts:
    """Token ids of the texts around a chunk: request for the first, request for a later one, postfix."""

    whole: tuple[int, ...]
    part: tuple[int, ...]
    postfix: tuple[int, ...]

    @classmethod
    def encoded(cls, context: CompressContext, request: Literal["text", "none"], postfix: str) -> Texts:
        """Encode what is needed; without request and postfix no tokenizer is.

        Raises:
            CompressorFault: there is no tokenizer.
        """
        try:
            whole, part = ((), ()) if request == "none" else (context.encode(REPEAT_ALL), context.encode(REPEAT_PART))
            return cls(tuple(whole), tuple(part), tuple(context.encode(postfix)) if postfix else ())
        except CompressorFault as error:
            raise CompressorFault(error.message, cause=error.cause, hint="or set request=none to repeat unasked") from error


@dataclass(frozen=True, eq=False)
class ScoringPass:
    """One chunk: ``positions`` of the prefix that it scores, ``token_ids`` that are run to score them."""

    positions: Tensor
    token_ids: tuple[int, ...]


def plan(token_ids: Sequence[int], free: Tensor, chunk: int, texts: Texts) -> Iterator[ScoringPass]:
    """Cut the context into chunks and write the request to repeat each (KVzip section 3.2; teacher forcing).

    Args:
        token_ids: of the prefix.
        free: int64 ``[n]``, positions to be scored, ascending.
        chunk: positions per pass.
        texts: what goes around the tokens of a chunk.
    """
    before: tuple[int, ...] = ()
    for number, start in enumerate(range(0, len(free), chunk)):
        positions = free[start : start + chunk]
        ids = tuple(token_ids[at] for at in positions.tolist())
        request = texts.part if number else texts.whole
        yield ScoringPass(positions, (*request, *before[-LEAD_IN:], *texts.postfix, *ids))
        before = ids


class PassReader:
    """Watches one pass: per layer and KV head the largest attention that any query pays to each position.

    Softmax over the keys of always-seen positions, of the chunk, and of the pass's own rows (causal), in
    float32; largest over the rows and the query heads of the group (KVzip equation 2).

    Args:
        prefix: keys come from here, one layer at a time.
        layers: descriptors of the layers to score, by number; other layers are ignored.
        always: int64, positions that every query sees (system prompt, sinks).
        scoring: the pass.
        name: who to name in an error.
    """

    def __init__(
        self, prefix: PrefixView, layers: Mapping[int, LayerDescriptor], always: Tensor, scoring: ScoringPass, name: str
    ) -> None:
        self.layers, self.name = layers, name
        self.first, self.count = len(always), len(scoring.positions)
        self.rows = len(scoring.token_ids)
        self.seen = dict.fromkeys(layers, 0)
        self.best: dict[int, Tensor] = {}
        self._keys: dict[int, Tensor] = {}
        wanted = torch.cat([always, scoring.positions])
        for index, layer in layers.items():
            keys = prefix.keys(index)
            space = keys.new_empty((layer.kv_heads, len(wanted) + self.rows, layer.head_dim), dtype=torch.float32)
            space[:, : len(wanted)] = keys.index_select(1, wanted.to(keys.device))
            self._keys[index] = space
            self.best[index] = keys.new_zeros((layer.kv_heads, self.count), dtype=torch.float32)

    def __call__(self, index: int, queries: Tensor, keys: Tensor) -> None:
        """One block of rows of one layer: queries ``[heads, rows, head_dim]``, keys ``[kv_heads, rows, head_dim]``."""
        layer = self.layers.get(index)
        if layer is None:
            return
        require_finite(self.name, layer, queries=queries, keys=keys)
        rows, space = keys.shape[1], self._keys[index]
        start = self.first + self.count + self.seen[index]
        stop = start + rows
        if stop > space.shape[1]:
            raise CompressorFault(f"{self.name}: scoring showed more rows of layer {index} than were asked for")
        space[:, start:stop] = keys
        self.seen[index] += rows
        grouped = queries.float().reshape(layer.kv_heads, layer.group * rows, layer.head_dim) * layer.scaling
        logits = torch.bmm(grouped, space[:, :stop].transpose(1, 2))
        future = torch.ones((rows, rows), dtype=torch.bool, device=logits.device).triu(1).repeat(layer.group, 1)
        logits[..., start:].masked_fill_(future, float("-inf"))
        paid = torch.softmax(logits, -1)[..., self.first : self.first + self.count]
        self.best[index] = torch.maximum(self.best[index], paid.amax(1))

    def finished(self) -> dict[int, Tensor]:
        """``[kv_heads, positions]`` per layer, on the CPU; raises ``CompressorFault`` if rows were not shown."""
        for index, seen in self.seen.items():
            if seen != self.rows:
                raise CompressorFault(f"{self.name}: scoring showed {seen} of {self.rows} rows of layer {index}")
        return {index: best.cpu() for index, best in self.best.items()}
