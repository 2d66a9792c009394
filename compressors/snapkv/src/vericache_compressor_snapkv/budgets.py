"""Budgets that differ by layer (PyramidKV) and by KV head (AdaKV), with exact totals.

All arithmetic is in integers and fractions: the totals are those of the uniform budget, not nearly so.
Counts here leave out what survives anyway (the observation window, protected spans).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from vericache_core import stable_topk


def rounded_to_total(shares: Sequence[Fraction], total: int) -> list[int]:
    """Integers next to ``shares`` that sum to ``total`` (largest remainders first, then the earlier ones).

    ``total`` must be the sum of the shares. Falling shares stay falling.
    """
    counts = [int(share) for share in shares]  # shares are not negative, so int() rounds down
    by_remainder = sorted(range(len(shares)), key=lambda at: (counts[at] - shares[at], at))
    for at in by_remainder[: total - sum(counts)]:
        counts[at] += 1
    return counts


def pyramid(layers: int, average: int, available: int, beta: int) -> list[int]:
    """Token budget per layer, falling linearly from the first to the last.

    PyramidKV (Cai et al., 2024, arXiv 2406.02069, section 3.2): the last layer gets ``average // beta``, the
    first what keeps the mean; a first layer that would exceed ``available`` is capped and the last one raised
    by the same. The reference rounds the step down, so its total differs from the uniform one, and divides by
    zero with one layer; here the counts sum to ``layers * average`` exactly.

    Args:
        layers: how many layers share the budget.
        average: tokens per layer of the uniform budget, at most ``available``.
        available: tokens that can be kept at all.
        beta: steepness; 1 is uniform.
    """
    if layers == 0:
        return []
    last = average // beta
    first = min(2 * average - last, available)
    last = 2 * average - first
    step = Fraction(first - last, max(layers - 1, 1))
    shares = [first - layer * step for layer in range(layers)] if layers > 1 else [Fraction(average)]
    return rounded_to_total(shares, layers * average)


def by_need(scores: Tensor, share: int, floor: float) -> list[int]:
    """Split ``kv_heads * share`` tokens among the KV heads of one layer.

    AdaKV (Feng et al., 2024, arXiv 2407.11550, algorithm 1): take the best ``kv_heads * share`` tokens of all
    heads together and count them by head; mix with a floor so that no head starves. The floor of 0.2 is
    kvpress's default; the authors' README uses 0.5. The reference rounds per head; here the counts sum to
    ``kv_heads * share`` exactly.

    Args:
        scores: float ``[kv_heads, tokens]``; ``-inf`` where a token is not to be chosen.
        share: tokens per head of the uniform budget, at most the number of tokens that can be chosen.
        floor: fraction of ``share`` that each head gets first.
    """
    kv_heads, tokens = scores.shape
    if share == 0:
        return [0] * kv_heads
    best = stable_topk(scores.flatten(), kv_heads * share)
    wins = torch.bincount(best // tokens, minlength=kv_heads).tolist()
    safe = int(share * Fraction(str(floor)))
    mixed = [safe + Fraction(won * (share - safe), share) for won in wins]
    return rounded_to_total(mixed, kv_heads * share)
