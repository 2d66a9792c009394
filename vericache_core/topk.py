"""Selection with a defined order among ties.

``torch.topk`` promises values, not which of several equal ones it returns, so a kept set would depend on
device, thread count and k. Everything here is a stable sort: equal scores go to the lower position.
"""

from __future__ import annotations

import torch
from torch import Tensor


def stable_topk(scores: Tensor, count: int) -> Tensor:
    """Positions of the ``count`` largest scores along the last axis, ascending.

    Args:
        scores: ``[..., tokens]``, any float dtype; NaN counts as the smallest score, so a broken scorer
            cannot push real tokens out.
        count: how many to keep, clamped to ``[0, tokens]``.

    Returns:
        int64 ``[..., count]``, strictly ascending along the last axis; nested: the result for ``k`` is a
        subset of the result for ``k + 1``.
    """
    tokens = scores.shape[-1]
    count = max(0, min(count, tokens))
    ranked = scores.float()
    ranked = torch.where(torch.isnan(ranked), torch.full_like(ranked, float("-inf")), ranked)
    order = torch.sort(ranked, dim=-1, descending=True, stable=True).indices
    return order[..., :count].sort(dim=-1).values


def first_argmax(logits: Tensor) -> int:
    """Index of the largest entry of ``[vocab]``; the lowest index among equals; NaN is never chosen.

    Raises:
        ValueError: if no entry is larger than ``-inf`` (all NaN or all masked).
    """
    values = torch.where(torch.isnan(logits), torch.full_like(logits, float("-inf")), logits)
    best = values.max()
    if best == float("-inf"):
        raise ValueError("no finite logit to choose from")
    return int((values == best).to(torch.uint8).argmax())
