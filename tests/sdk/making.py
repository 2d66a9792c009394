"""Small KV caches and compressors for the tests of the SDK."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor

from vericache_core.coded import Codec, Codes
from vericache_core.compressor import QuantizationCompressor, TokenDropCompressor
from vericache_core.context import CompressContext
from vericache_core.kv import CompressedKV, LayerDescriptor, PrefixView
from vericache_core.packing import pack, unpack
from vericache_core.plugins.options import Budget


def descriptor(
    index: int = 0,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
) -> LayerDescriptor:
    return LayerDescriptor(
        index=index,
        kind="full" if window is None else "sliding",
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim or head_dim,
        dtype=dtype,
        scaling=head_dim**-0.5,
        sliding_window=window,
    )


def cache(layers: Iterable[LayerDescriptor], tokens: int, seed: int = 0) -> tuple[list[Tensor], list[Tensor]]:
    """Random keys and values per layer, ``[kv_heads, tokens, width]``."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = [], []
    for layer in layers:
        keys.append(torch.randn(layer.kv_heads, tokens, layer.head_dim, generator=generator).to(layer.dtype))
        values.append(torch.randn(layer.kv_heads, tokens, layer.value_dim, generator=generator).to(layer.dtype))
    return keys, values


def view(layers: list[LayerDescriptor], kv: tuple[list[Tensor], list[Tensor]], start: int, stop: int) -> PrefixView:
    keys, values = kv
    part = slice(start, stop)
    return PrefixView.from_tensors(layers, [k[:, part] for k in keys], [v[:, part] for v in values], range(start, stop), start)


def stored_bytes(compressed: CompressedKV) -> bytes:
    """Every stored byte with its name, shape and dtype: equal only if nothing differs."""
    parts = [str(compressed.tokens).encode()]
    for layer in compressed.layers:
        if layer is None:
            parts.append(b"-")
            continue
        for name, tensor in sorted({**layer.tensors(), **layer.surviving.named_storage()}.items()):
            parts.append(f"{name} {tuple(tensor.shape)} {tensor.dtype} {layer.surviving.counts}".encode())
            parts.append(tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return b"|".join(parts)


class NormDropper(TokenDropCompressor):
    """Keeps the keys of largest norm."""

    name: ClassVar[str] = "norm"

    def __init__(self, options: Budget | None = None) -> None:
        super().__init__(options or Budget())

    def score(self, layer: LayerDescriptor, keys: Tensor, values: Tensor, context: CompressContext) -> Tensor:
        return keys.float().square().sum(-1)


class RoundCodec(Codec):
    """Rounds to 3 bits around a mean kept per ``unit`` tokens; enough of a codec to test streams."""

    def __init__(self, unit: int) -> None:
        self.unit = unit

    def encode(self, rows: Tensor) -> Codes:
        units = rows.float().reshape(rows.shape[0], -1, self.unit, rows.shape[2])
        mean = units.mean(2, keepdim=True)
        codes = ((units - mean) * 2 + 4).round().clamp(0, 7).to(torch.uint8)
        return {"codes": pack(codes, 3), "mean": mean.squeeze(2), "width": torch.full(units.shape[:2], rows.shape[2])}

    def decode(self, codes: Codes) -> Tensor:
        width = int(codes["width"].flatten()[0])
        units = (unpack(codes["codes"], 3, width).float() - 4) / 2 + codes["mean"].unsqueeze(2)
        return units.reshape(units.shape[0], -1, width)


class RoundQuantizer(QuantizationCompressor):
    """Keys in whole blocks of ``residual``, values up to ``residual`` tokens from the end."""

    name: ClassVar[str] = "round"

    def __init__(self, unit: int = 4, residual: int = 8) -> None:
        super().__init__()
        self.unit, self.residual = unit, residual

    def key_codec(self, layer: LayerDescriptor) -> Codec:
        return RoundCodec(self.unit)

    def value_codec(self, layer: LayerDescriptor) -> Codec:
        return RoundCodec(1)

    def key_boundary(self, tokens: int) -> int:
        return tokens // self.residual * self.residual

    def value_boundary(self, tokens: int) -> int:
        return max(0, tokens - self.residual)
