"""The running state of a softmax that sees its keys block by block.

Every attention in the project folds key blocks, in order, into this state (Milakov and Gimelshein,
"Online normalizer calculation for softmax", 2018). A compressed prefix may therefore be attended to by
its own code first and the exact tail afterwards, by other code, without either knowing of the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class AttentionState:
    """Softmax accumulators of ``heads x rows`` query rows, all float32.

    Attributes:
        top: ``[heads, rows]``, largest score so far; ``-inf`` before the first key.
        total: ``[heads, rows]``, sum of ``exp(score - top)``.
        acc: ``[heads, rows, value_dim]``, sum of ``exp(score - top) * value``.
    """

    top: Tensor
    total: Tensor
    acc: Tensor

    @classmethod
    def fresh(cls, heads: int, rows: int, value_dim: int, device: torch.device | str = "cpu") -> AttentionState:
        """A state that has seen no key."""
        top = torch.full((heads, rows), float("-inf"), dtype=torch.float32, device=device)
        total = torch.zeros((heads, rows), dtype=torch.float32, device=device)
        return cls(top, total, torch.zeros((heads, rows, value_dim), dtype=torch.float32, device=device))

    def fold(self, query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None = None) -> None:
        """Fold one block of keys in, in place.

        Args:
            query: ``[heads, rows, head_dim]`` float32, already multiplied by the attention scaling.
            keys: ``[kv_heads, tokens, head_dim]``, any float dtype.
            values: ``[kv_heads, tokens, value_dim]``, any float dtype.
            hidden: bool, broadcastable to ``[kv_heads, group, rows, tokens]``; True hides a key from a row.
                Whatever a hidden key or value holds, NaN included, contributes exactly nothing, and a block
                that is hidden completely leaves the state bit for bit as it was. NaN or infinity in a value
                that a row does see makes that row NaN.
        """
        heads, rows, head_dim = query.shape
        kv_heads, tokens = keys.shape[0], keys.shape[1]
        if tokens == 0:
            return
        group = heads // kv_heads
        grouped = query.reshape(kv_heads, group * rows, head_dim)
        scores = torch.bmm(grouped, keys.float().transpose(1, 2)).view(kv_heads, group, rows, tokens)
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        block_top = scores.amax(-1, keepdim=True)
        old_top = self.top.view(kv_heads, group, rows, 1)
        top = torch.maximum(old_top, block_top)
        # A row that has seen nothing yet keeps top = -inf; subtracting it would give NaN, so use 0 there.
        base = torch.where(top == float("-inf"), torch.zeros_like(top), top)
        weights, decay = torch.exp(scores - base), torch.exp(old_top - base)
        total = self.total.view(kv_heads, group, rows, 1) * decay + weights.sum(-1, keepdim=True)
        flat = weights.view(kv_heads, group * rows, tokens)
        update = torch.bmm(flat, values.float()) if hidden is None else _weigh(flat, values.float())
        acc = (self.acc.view(kv_heads, group, rows, -1) * decay).view_as(self.acc) + update.view_as(self.acc)
        if hidden is not None:
            # Adding zeros is not quite nothing: -0.0 + 0.0 is 0.0.
            unseen = (block_top == float("-inf")).view(heads, rows, 1)
            acc = torch.where(unseen, self.acc, acc)
        self.acc, self.top, self.total = acc, top.view(heads, rows), total.view(heads, rows)

    def merge(self, other: AttentionState) -> None:
        """Fold in what ``other`` saw, as if its keys had been folded here; ``other`` has the same shapes."""
        top = torch.maximum(self.top, other.top)
        base = torch.where(top == float("-inf"), torch.zeros_like(top), top)
        mine, theirs = torch.exp(self.top - base), torch.exp(other.top - base)
        self.acc = self.acc * mine.unsqueeze(-1) + other.acc * theirs.unsqueeze(-1)
        self.top, self.total = top, self.total * mine + other.total * theirs

    def output(self) -> Tensor:
        """``[heads, rows, value_dim]`` float32; zeros for a row that saw no key."""
        empty = self.total == 0
        return self.acc / torch.where(empty, torch.ones_like(self.total), self.total).unsqueeze(-1)


def _weigh(weights: Tensor, values: Tensor) -> Tensor:
    """``weights @ values`` where weight 0 hides a value even if it is NaN or infinite, without a branch.

    Bit for bit ``torch.bmm(weights, values)`` when all values are finite.
    """
    finite = torch.isfinite(values)
    clean = torch.where(finite, values, torch.zeros_like(values))
    broken = (~finite).any(-1, keepdim=True).to(weights.dtype)
    return torch.bmm(weights, clean).masked_fill(torch.bmm(weights, broken) > 0, float("nan"))
