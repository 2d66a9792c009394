"""How much the observation window attends to each token, per KV head."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KEY_BLOCK = 8192
"""Keys multiplied at a time, to bound temporaries on long prompts."""


def window_attention(queries: Tensor, keys: Tensor, scaling: float, reducer: Literal["mean", "max", "sum"]) -> Tensor:
    """Attention that each token gets from the newest rows, summed over the rows and reduced over the group.

    SnapKV section 4.1: ``softmax(Q_window K^T * scaling)`` with a causal mask inside the window. The query
    heads that share a KV head are reduced here, before any pooling, so that one set of tokens is kept per KV
    head and nothing is stored at query-head count.

    Args:
        queries: ``[heads, rows, head_dim]``, after rotary embedding; the last row belongs to the last key.
        keys: ``[kv_heads, tokens, head_dim]``, after rotary embedding; ``tokens >= rows``.
        scaling: the model's factor on query-key products, not always ``head_dim ** -0.5``.
        reducer: how the ``heads / kv_heads`` query heads of a KV head become one.

    Returns:
        float64 ``[kv_heads, tokens]``. Probabilities are float32; products and sums are accumulated in
        float64, so that the number of threads cannot change a result. The largest temporary is one KV head's
        ``[group * rows, tokens]``.
    """
    (heads, rows, _), (kv_heads, tokens, _) = queries.shape, keys.shape
    group = heads // kv_heads
    future = torch.ones((rows, rows), dtype=torch.bool, device=keys.device).triu(1).repeat(group, 1)
    scores = torch.empty((kv_heads, tokens), dtype=torch.float64, device=keys.device)
    logits = torch.empty((group * rows, tokens), dtype=torch.float32, device=keys.device)
    for head in range(kv_heads):
        query = queries[head * group : (head + 1) * group].reshape(group * rows, -1).double() * scaling
        for start in range(0, tokens, KEY_BLOCK):
            block = slice(start, start + KEY_BLOCK)
            logits[:, block] = query @ keys[head, block].double().T
        logits[:, tokens - rows :].masked_fill_(future, float("-inf"))
        received = torch.softmax(logits, -1).view(group, rows, tokens).sum(1, dtype=torch.float64)
        if reducer == "max":
            scores[head] = received.amax(0)
        else:
            scores[head] = received.sum(0) / (group if reducer == "mean" else 1)
    return scores


def pool(scores: Tensor, kernel: int, pooling: Literal["max", "avg"]) -> Tensor:
    """Pool along tokens with stride 1 and the window centred, SnapKV section 4.2.

    Positions that do not exist take no part: an average divides by the neighbours there are. (The reference
    and kvpress pad with zeros and divide by ``kernel``, which costs the first token 3/7 of its score at
    kernel 7.)

    Args:
        scores: ``[kv_heads, tokens]``, any float dtype.
        kernel: odd width.
        pooling: ``"max"`` or ``"avg"``.

    Returns:
        ``[kv_heads, tokens]``, same dtype.
    """
    if kernel == 1 or scores.shape[1] == 0:
        return scores
    if pooling == "max":
        return torch.nn.functional.max_pool1d(scores, kernel, 1, kernel // 2)
    return torch.nn.functional.avg_pool1d(scores, kernel, 1, kernel // 2, count_include_pad=False)
