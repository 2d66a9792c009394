"""The two codecs: asymmetric min/max quantization of groups, keys along tokens and values along channels.

A group of elements ``x`` becomes ``low = min(x)``, ``scale = (max(x) - min(x)) / (2**bits - 1)`` and codes
``round((x - low) / scale)``, half to even (KIVI section 3.1, equation 1, with the zero point as a float).
Packing is least significant bits first, as in the authors' int32 words on a little-endian machine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vericache_core import Codec
from vericache_core.coded import Codes
from vericache_core.errors import CompressorFault
from vericache_core.packing import pack, unpack

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


class KeyCodec(Codec):
    """Keys per channel: a group is ``group`` consecutive tokens of one channel.

    Codes (axis 1 counts groups of tokens): ``codes`` uint8 ``[kv_heads, units, head_dim, group * bits / 8]``,
    ``scale`` and ``low`` ``[kv_heads, units, head_dim]`` in the model's dtype.
    """

    def __init__(self, bits: int, group: int, label: str = "kivi") -> None:
        self.bits, self.unit, self.label = bits, group, label

    def encode(self, rows: Tensor) -> Codes:
        kv_heads, tokens, head_dim = rows.shape
        groups = rows.reshape(kv_heads, tokens // self.unit, self.unit, head_dim).transpose(2, 3).contiguous()
        codes, scale, low = quantize(groups, self.bits, self.label)
        return {"codes": pack(codes, self.bits), "scale": scale, "low": low}

    def decode(self, codes: Codes) -> Tensor:
        groups = dequantize(unpack(codes["codes"], self.bits, self.unit), codes["scale"], codes["low"])
        kv_heads, units, head_dim, _ = groups.shape
        # Channel-major in memory: attention multiplies by the transpose.
        return groups.transpose(1, 2).reshape(kv_heads, head_dim, units * self.unit).transpose(1, 2)


class ValueCodec(Codec):
    """Values per token: a group is ``group`` consecutive channels of one token.

    Codes (axis 1 counts tokens): ``codes`` uint8 ``[kv_heads, tokens, value_dim / group, group * bits / 8]``,
    ``scale`` and ``low`` ``[kv_heads, tokens, value_dim / group]`` in the model's dtype.
    """

    def __init__(self, bits: int, group: int, label: str = "kivi") -> None:
        self.bits, self.group, self.label = bits, group, label

    def encode(self, rows: Tensor) -> Codes:
        kv_heads, tokens, value_dim = rows.shape
        groups = rows.reshape(kv_heads, tokens, value_dim // self.group, self.group)
        codes, scale, low = quantize(groups, self.bits, self.label)
        return {"codes": pack(codes, self.bits), "scale": scale, "low": low}

    def decode(self, codes: Codes) -> Tensor:
        return dequantize(unpack(codes["codes"], self.bits, self.group), codes["scale"], codes["low"]).flatten(2)
