"""The two codecs: asymmetric min/max quantization of groups, keys along tokens and values along channels.

KIVI section 3.1, equation 1, with the zero point as a float; the arithmetic is :mod:`vericache_core.minmax`.
Packing is least significant bits first, as in the authors' int32 words on a little-endian machine.
"""

from __future__ import annotations

from torch import Tensor

from vericache_core import Codec
from vericache_core.attention.layouts import CodeLayout
from vericache_core.coded import Codes
from vericache_core.minmax import dequantize, quantize
from vericache_core.packing import pack, unpack


class KeyCodec(Codec):
    """Keys per channel: a group is ``group`` consecutive tokens of one channel.

    Codes (axis 1 counts groups of tokens): ``codes`` uint8 ``[kv_heads, units, head_dim, group * bits / 8]``,
    ``scale`` and ``low`` ``[kv_heads, units, head_dim]`` in the model's dtype.
    """

    def __init__(self, bits: int, group: int, label: str = "kivi") -> None:
        self.bits, self.unit, self.label = bits, group, label
        self.layout = CodeLayout("token-groups", bits, group)

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
        self.layout = CodeLayout("channel-groups", bits, group)

    def encode(self, rows: Tensor) -> Codes:
        kv_heads, tokens, value_dim = rows.shape
        groups = rows.reshape(kv_heads, tokens, value_dim // self.group, self.group)
        codes, scale, low = quantize(groups, self.bits, self.label)
        return {"codes": pack(codes, self.bits), "scale": scale, "low": low}

    def decode(self, codes: Codes) -> Tensor:
        return dequantize(unpack(codes["codes"], self.bits, self.group), codes["scale"], codes["low"]).flatten(2)
