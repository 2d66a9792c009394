"""The compressor: score by repetition, then one budget over everything."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from vericache_compressor_kvzip import score_file
from vericache_compressor_kvzip.options import KVzipOptions
from vericache_compressor_kvzip.passes import PassReader, Texts, plan
from vericache_core import CompressContext, LayerDescriptor, Needs, PrefixView, TokenDropCompressor, stable_topk
from vericache_core.compressor import require_finite

ALGORITHM = 1
"""Version of the scores; raised whenever the same prefix would get others."""


class KVzipCompressor(TokenDropCompressor):
    """KVzip (arXiv 2505.23416): a pair is worth the largest attention it gets when the model repeats its context.

    The context is everything outside the protected spans and sinks. It is repeated in chunks, teacher-forced,
    on the full cache; see :class:`~vericache_compressor_kvzip.passes.PassReader` for the score.

    ``level="pair"`` spends one budget over all layers and KV heads: exactly ``layers * kv_heads * count`` pairs
    survive, ties going to the earlier layer, head and position. (The reference keeps what is strictly above a
    threshold: fewer under ties, and nothing at all when many scores share the maximum.) Each KV head keeps at
    least one token. ``level="uniform"`` gives each the same count.

    Protected spans always survive and do not count against the budget, sinks do. Only layers with full
    attention are compressed. Keys stay as they are; tokens that arrive later are all kept.

    With the same chunks, request and seen keys the scores equal those of kvpress's ``KVzipPress`` in float32; by
    default kvpress differs in all three, and evicts a system prompt beyond its sinks (see the README).

    Raises:
        CompressorFault: the context has no tokenizer or cannot run passes, or shows NaN or infinity.
    """

    name: ClassVar[str] = "kvzip"
    options: KVzipOptions

    def __init__(self, options: KVzipOptions | None = None) -> None:
        super().__init__(options or KVzipOptions())

    @property
    def needs(self) -> Needs:
        return Needs(scoring=True)

    def scores(self, prefix: PrefixView, context: CompressContext) -> dict[int, Tensor]:
        layers = {layer.index: layer for layer in prefix.layers if self.supports(layer)}
        scores = {index: torch.zeros((layer.kv_heads, prefix.tokens)) for index, layer in layers.items()}
        for index, layer in layers.items():
            keys, values = prefix.rows(index)
            require_finite(self.name, layer, keys=keys, values=values)
        seen = self._spans(prefix.tokens, context)
        seen[: self.options.sinks] = True
        always, free = (torch.nonzero(part).flatten() for part in (seen, ~seen))
        if not layers or not len(free):
            return scores
        texts = Texts.encoded(context, self.options.request, self.options.postfix)
        directory = None if self.options.scores_dir is None else Path(self.options.scores_dir)
        key = ""
        if directory is not None:
            settings = json.dumps([ALGORITHM, self.options.chunk, texts.whole, texts.part, texts.postfix])
            key = score_file.fingerprint(prefix, tuple(layers.values()), always, settings)
            stored = score_file.read(directory, key)
            if stored is not None:
                return stored
        for scoring in plan(prefix.token_ids, free, self.options.chunk, texts):
            reader = PassReader(prefix, layers, always, scoring, self.name)
            context.score(scoring.token_ids, reader)
            for index, best in reader.finished().items():
                scores[index][:, scoring.positions] = best
        if directory is not None:
            score_file.write(directory, key, scores)
        return scores

    def protected(self, layer: LayerDescriptor, tokens: int, context: CompressContext) -> Tensor:
        mask = self._spans(tokens, context)
        sinks = torch.nonzero(~mask[: self.options.sinks]).flatten()
        mask[sinks[: self._count(tokens, context)]] = True
        return mask

    def allocate(
        self, layers: Sequence[LayerDescriptor], scores: Sequence[Tensor], tokens: int, context: CompressContext
    ) -> list[list[int]]:
        if not layers:
            return []
        fixed = int(torch.isinf(scores[0][0]).sum())  # the same in every layer and head
        share = int(self._spans(tokens, context).sum()) + self._count(tokens, context) - fixed
        heads = [layer.kv_heads for layer in layers]
        if self.options.level == "uniform":
            return [[fixed + share] * count for count in heads]
        every = torch.cat([score.masked_fill(torch.isinf(score), float("-inf")) for score in scores])
        if fixed == 0:  # no head may go empty: its best token comes first
            every.scatter_(1, stable_topk(every, 1), float("inf"))
        best = stable_topk(every.flatten(), sum(heads) * share)
        won = torch.bincount(best // max(tokens, 1), minlength=sum(heads)) + fixed
        counts = iter(won.tolist())
        return [[next(counts) for _ in range(number)] for number in heads]

    def _spans(self, tokens: int, context: CompressContext) -> Tensor:
        """Positions that the context protects, bool ``[tokens]``."""
        mask = torch.zeros(tokens, dtype=torch.bool)
        for start, stop in context.protected:
            mask[start:stop] = True
        return mask

    def _count(self, tokens: int, context: CompressContext) -> int:
        """Tokens that each KV head keeps on average, beside the protected spans."""
        return self.options.kept_tokens(tokens - int(self._spans(tokens, context).sum()))
