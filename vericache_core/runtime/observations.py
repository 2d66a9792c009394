"""What prefill records for a compressor: window queries, and attention mass where asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from vericache_core.attention.online import AttentionState
from vericache_core.context import Needs
from vericache_core.kv import LayerDescriptor

MASS_BLOCK = 1024
"""Keys per block while attention mass is summed."""


class Observations:
    """Rows seen during the prefill of one request, as much as ``needs`` asks for.

    Args:
        needs: of the compressor.
        tokens: length of the prefix that will be compressed.
    """

    def __init__(self, needs: Needs, tokens: int) -> None:
        self.needs, self.tokens = needs, tokens
        self._queries: dict[int, list[Tensor]] = {}
        self._mass: dict[int, Tensor] = {}

    def add(self, layer: LayerDescriptor, position: int, queries: Tensor, keys: Tensor | None) -> None:
        """Record a block of rows.

        Args:
            layer: descriptor.
            position: of the first row.
            queries: ``[rows, heads, head_dim]`` in the model's dtype, unscaled.
            keys: ``[kv_heads, position + rows, head_dim]``, needed for attention mass only.
        """
        if self.needs.queries:
            skip = max(0, self.tokens - self.needs.queries - position)
            if skip < queries.shape[0]:
                self._queries.setdefault(layer.index, []).append(queries[skip:].transpose(0, 1).clone())
        if self.needs.attention_mass and keys is not None:
            self._add_mass(layer, position, queries.transpose(0, 1).float() * layer.scaling, keys)

    def _add_mass(self, layer: LayerDescriptor, position: int, scaled: Tensor, keys: Tensor) -> None:
        rows = scaled.shape[1]
        limits = position + torch.arange(1, rows + 1, device=scaled.device)
        state = AttentionState.fresh(layer.heads, rows, 1, scaled.device)
        blocks = range(0, keys.shape[1], MASS_BLOCK)
        nothing = keys.new_zeros((layer.kv_heads, MASS_BLOCK, 1))
        for start in blocks:
            block = keys[:, start : start + MASS_BLOCK]
            index = torch.arange(start, start + block.shape[1], device=scaled.device)
            state.fold(scaled, block, nothing[:, : block.shape[1]], index >= limits[None, None, :, None])
        mass = self._mass.setdefault(layer.index, torch.zeros((layer.heads, self.tokens), device=scaled.device))
        for start in blocks:
            block = keys[:, start : start + MASS_BLOCK].float().repeat_interleave(layer.group, 0)
            scores = torch.bmm(scaled, block.transpose(1, 2))
            index = torch.arange(start, start + block.shape[1], device=scaled.device)
            paid = torch.exp(scores - state.top.unsqueeze(-1)) / state.total.unsqueeze(-1)
            paid = paid.masked_fill(index >= limits[None, :, None], 0.0)
            mass[:, start : start + block.shape[1]] += paid.sum(1)

    def queries(self, layer: int) -> Tensor:
        """``[heads, min(needs.queries, tokens), head_dim]``, oldest first."""
        return torch.cat(self._queries[layer], 1)

    def mass(self, layer: int) -> Tensor:
        """float32 ``[heads, tokens]``."""
        return self._mass[layer].clone()
