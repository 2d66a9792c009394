"""The compressor: observe, pool, spend the budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from vericache_compressor_snapkv.budgets import by_need, pyramid
from vericache_compressor_snapkv.options import SnapKVOptions
from vericache_compressor_snapkv.scoring import pool, window_attention
from vericache_core import CompressContext, LayerDescriptor, Needs, TokenDropCompressor
from vericache_core.compressor import require_finite
from vericache_core.errors import CompressorFault


class SnapKVCompressor(TokenDropCompressor):
    """SnapKV (arXiv 2404.14469) at KV-head layout.

    Per KV head and earlier token, the score is the attention that the newest ``window`` queries pay to it,
    reduced over the query heads of the group, then pooled over neighbours. The window itself survives, the
    rest of the budget goes to the best scores; equal scores go to the lower position. A prompt shorter than
    the window is observed by all of its tokens. Where the budget is smaller than the window, the newest
    tokens of the window survive, so that the budget holds; only spans that the context protects can exceed it.

    Only layers with full attention are compressed. Keys are kept as they are, so positions stay those of the
    prompt. Tokens that arrive later are all kept.

    Raises:
        CompressorFault: NaN or infinity in queries, keys or values, or no queries in the context.
    """

    name: ClassVar[str] = "snapkv"
    options: SnapKVOptions

    def __init__(self, options: SnapKVOptions | None = None) -> None:
        super().__init__(options or SnapKVOptions())

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.options.window)

    def score(self, layer: LayerDescriptor, keys: Tensor, values: Tensor, context: CompressContext) -> Tensor:
        tokens = keys.shape[1]
        rows = min(self.options.window, tokens)
        if rows == 0:
            return torch.zeros((layer.kv_heads, 0))
        queries = context.queries(layer.index)
        if queries.shape[0] != layer.heads or queries.shape[1] < rows or queries.shape[2] != layer.head_dim:
            raise CompressorFault(
                f"{self.name}: queries of layer {layer.index} have shape {tuple(queries.shape)}",
                cause=f"expected (heads, rows, head_dim) = {(layer.heads, rows, layer.head_dim)}",
            )
        require_finite(self.name, layer, queries=queries, keys=keys, values=values)
        queries = queries[:, -rows:].to(keys.device)
        received = window_attention(queries, keys, layer.scaling, self.options.reducer)
        past = pool(received[:, : tokens - rows], self.options.kernel, self.options.pooling)
        return torch.nn.functional.pad(past.float(), (0, rows))

    def protected(self, layer: LayerDescriptor, tokens: int, context: CompressContext) -> Tensor:
        mask = super().protected(layer, tokens, context)
        mask[max(0, tokens - min(self.options.window, self.options.kept_tokens(tokens))) :] = True
        return mask

    def allocate(
        self, layers: Sequence[LayerDescriptor], scores: Sequence[Tensor], tokens: int, context: CompressContext
    ) -> list[list[int]]:
        capacity = self.options.kept_tokens(tokens)
        fixed = int(torch.isinf(scores[0][0]).sum()) if scores else 0  # the same in every layer and head
        average = max(0, capacity - fixed)
        budgets = [average] * len(layers)
        if self.options.budget == "pyramid":
            budgets = pyramid(len(layers), average, tokens - fixed, self.options.beta)
        counts = []
        for layer, score, share in zip(layers, scores, budgets, strict=True):
            heads = [share] * layer.kv_heads
            if self.options.adaptive:
                heads = by_need(score.masked_fill(torch.isinf(score), float("-inf")), share, self.options.floor)
            counts.append([fixed + head for head in heads])
        return counts
