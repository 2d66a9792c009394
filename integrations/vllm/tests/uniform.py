"""A plain min/max quantizer of any width for tests: 8 bits lose almost nothing, 2 bits almost everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from vericache_core import API_VERSION, Codec, CompressorSpec, LayerDescriptor, Options, QuantizationCompressor, option
from vericache_core.coded import Codes
from vericache_core.minmax import dequantize, quantize


@dataclass(frozen=True, kw_only=True)
class UniformOptions(Options):
    bits: int = option(8, help="bits of a code", ge=1, le=8)


class RowCodec(Codec):
    """One scale a row."""

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def encode(self, rows: Tensor) -> Codes:
        codes, scale, low = quantize(rows, self.bits, "uniform")
        return {"codes": codes, "scale": scale, "low": low}

    def decode(self, codes: Codes) -> Tensor:
        return dequantize(codes["codes"], codes["scale"], codes["low"])


class UniformCompressor(QuantizationCompressor):
    name: ClassVar[str] = "uniform"

    def key_codec(self, layer: LayerDescriptor) -> Codec:
        return RowCodec(self.options.bits)

    def value_codec(self, layer: LayerDescriptor) -> Codec:
        return RowCodec(self.options.bits)


SPEC = CompressorSpec(
    name="uniform",
    factory=UniformCompressor,
    options=UniformOptions,
    kind="quantization",
    api_version=API_VERSION,
    summary="min/max codes a row, for tests",
)
