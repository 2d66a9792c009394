"""Asymmetric min/max quantization of groups: the piece that several quantizers share.

A group of elements ``x`` becomes ``low = min(x)``, ``scale = (max(x) - min(x)) / (2**bits - 1)`` and codes
``round((x - low) / scale)``, half to even.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vericache_core.errors import CompressorFault

LARGEST_RANGE = torch.finfo(torch.float32).max / 2
"""Widest ``max - min`` of a group that is encoded; beyond it float32 cannot carry codes back."""


def quantize(rows: Tensor, bits: int, label: str) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize groups along the last axis.

    All arithmetic is float32 on the *stored* scale and low, so that ``|row - decoded| <= scale / 2`` holds for
    what is stored (up to half an ulp of the float32 result), in every dtype:

    - ``low`` is an element of the group, so rounding to the dtype of the rows does not change it;
    - rounding ``scale`` moves the largest element by at most ``levels`` times half an ulp of ``scale``;
    - where the scale would round down to zero, or is subnormal and too coarse, the next larger is taken;
    - where rounding up would carry a decoded element past the largest finite number, the next smaller;
    - a group of equal elements gets scale 1, code 0, and comes back exactly.

    Args:
        rows: ``[..., group]``, float; not changed.
        bits: width of a code.
        label: who to name in an error.

    Returns:
        Codes uint8 ``[..., group]``; scale and low ``[...]`` in the dtype of ``rows``.

    Raises:
        CompressorFault: a group's range is infinite, NaN, or above :data:`LARGEST_RANGE`.
    """
    levels, dtype = (1 << bits) - 1, rows.dtype
    wide = rows.float()
    low, high = (part + 0.0 for part in torch.aminmax(wide, dim=-1))  # + 0.0: no -0.0, whose order among zeros is open
    span = high - low
    if not bool((span <= LARGEST_RANGE).all()):
        raise CompressorFault(f"{label}: max - min of a group is not below {LARGEST_RANGE:.3g}")
    limits = torch.finfo(dtype)
    scale = (span / levels).to(dtype)
    overshoots = low + scale.float() * levels > limits.max
    scale = torch.where(overshoots, (span / levels * (1 - 2**-8)).to(dtype), scale)
    falls_short = span > scale.float() * (levels + 0.5)
    scale = torch.where(falls_short, (scale.float() + limits.smallest_normal * limits.eps).to(dtype), scale)
    scale = torch.where(span == 0, torch.ones_like(scale), scale)
    steps = (wide - low.unsqueeze(-1)).div_(scale.float().unsqueeze(-1)).round_()
    return steps.clamp_(0, levels).to(torch.uint8), scale, low.to(dtype)


def dequantize(codes: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    """``codes * scale + low`` in float32, ``[..., group]``.

    Multiplied, rounded, then added: a fused operation would give other bits on other hardware.
    """
    return codes.float().mul_(scale.float().unsqueeze(-1)).add_(low.float().unsqueeze(-1))
