"""The two compressors that the mutants are made of. They have no fault and must pass everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from vericache_core.coded import Codec, Codes
from vericache_core.compressor import QuantizationCompressor, TokenDropCompressor
from vericache_core.context import CompressContext
from vericache_core.kv import LayerDescriptor
from vericache_core.packing import pack, unpack
from vericache_core.plugins.options import Budget, Options, option
from vericache_core.plugins.spec import CompressorSpec


@dataclass(frozen=True, kw_only=True)
class DropOptions(Budget):
    """Budget and a window of newest tokens."""

    window: int = option(8, help="newest tokens that always survive", unit="tokens", ge=1)


class Drop(TokenDropCompressor):
    """Keeps the window and the keys of largest norm."""

    name: ClassVar[str] = "healthy-drop"
    options: DropOptions

    def score(self, layer: LayerDescriptor, keys: Tensor, values: Tensor, context: CompressContext) -> Tensor:
        return keys.float().square().sum(-1).nan_to_num(posinf=0.0)

    def protected(self, layer: LayerDescriptor, tokens: int, context: CompressContext) -> Tensor:
        mask = super().protected(layer, tokens, context)
        mask[max(0, tokens - min(self.options.window, self.options.kept_tokens(tokens))) :] = True
        return mask


@dataclass(frozen=True, kw_only=True)
class QuantOptions(Options):
    """Width of a code and how many newest tokens stay exact."""

    bits: int = option(4, help="bits per code", choices=(2, 4))
    residual: int = option(16, help="newest tokens that stay exact", unit="tokens", ge=1)


class RowCodec(Codec):
    """Asymmetric min/max codes, one scale a row."""

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def encode(self, rows: Tensor) -> Codes:
        wide = rows.float()
        low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
        step = (high - low) / ((1 << self.bits) - 1)
        step = torch.where(step > 0, step, torch.ones_like(step))
        codes = ((wide - low) / step).round().clamp(0, (1 << self.bits) - 1).to(torch.uint8)
        return {"codes": pack(codes, self.bits), "low": low, "step": step}

    def decode(self, codes: Codes) -> Tensor:
        count = codes["codes"].shape[-1] * 8 // self.bits
        return unpack(codes["codes"], self.bits, count).float() * codes["step"] + codes["low"]


class Quant(QuantizationCompressor):
    """Codes by row; the newest tokens are exact."""

    name: ClassVar[str] = "healthy-quant"
    options: QuantOptions

    def key_codec(self, layer: LayerDescriptor) -> Codec:
        return RowCodec(self.options.bits)

    def value_codec(self, layer: LayerDescriptor) -> Codec:
        return RowCodec(self.options.bits)

    def key_boundary(self, tokens: int) -> int:
        return max(0, tokens - self.options.residual)

    def value_boundary(self, tokens: int) -> int:
        return max(0, tokens - self.options.residual)


YES: dict[str, Any] = {"extend": "yes", "rollback": "yes"}


def spec(kind_of: type[Drop | Quant], **changes: Any) -> CompressorSpec:
    """A descriptor for a mutant class."""
    drops = issubclass(kind_of, Drop)
    settings: dict[str, Any] = {
        "name": kind_of.name,
        "factory": kind_of,
        "options": DropOptions if drops else QuantOptions,
        "kind": "token-drop" if drops else "quantization",
        "api_version": 1,
        "capabilities": YES,
    }
    return CompressorSpec(**{**settings, **changes})


DROP = spec(Drop)
QUANT = spec(Quant)
