"""The small operations of a decoder layer on rows, in torch as the models of transformers write them.

The naive reference of ``numba_rows.py``; nothing runs it but tests.
"""

from __future__ import annotations

import torch
from torch import Tensor


def norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis: float32 inside, rounded to the dtype before the weight."""
    wide = rows.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(rows.dtype)


def gate(rows: Tensor) -> Tensor:
    """``[rows, 2 * width]``, gate first -> ``[rows, width]``."""
    first, second = rows.chunk(2, -1)
    return torch.nn.functional.silu(first) * second


def rotate(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``[rows, heads, width]`` by ``[rows, width]``."""
    left, right = rows.chunk(2, -1)
    return rows * cos.unsqueeze(1) + torch.cat((-right, left), -1) * sin.unsqueeze(1)
