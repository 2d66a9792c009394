"""Three compressors that ship with the core: the two ends of the scale, and chance.

``identity`` loses nothing (every draft is accepted), ``random`` keeps positions by lot, ``adversarial``
returns noise (no draft should be accepted). They bound every measurement and test the runtime.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vericache_core.coded import Codec, Codes
from vericache_core.compressor import QuantizationCompressor, TokenDropCompressor
from vericache_core.context import CompressContext
from vericache_core.kv import LayerDescriptor
from vericache_core.plugins.hooks import hookimpl
from vericache_core.plugins.options import Budget, option
from vericache_core.plugins.spec import API_VERSION, CompressorSpec


@dataclass(frozen=True)
class IdentityOptions:
    """``identity`` has nothing to set."""

    def kept_tokens(self, tokens: int) -> int:
        return tokens


class IdentityCompressor(TokenDropCompressor):
    """Keeps every token; the compressed cache equals the full one bit for bit."""

    name: ClassVar[str] = "identity"

    def score(self, layer: LayerDescriptor, keys: Tensor, values: Tensor, context: CompressContext) -> Tensor:
        return torch.zeros(keys.shape[:2])


@dataclass(frozen=True)
class RandomOptions(Budget):
    """Budget and seed of ``random``."""

    seed: int = option(0, help="seed of the draw", ge=0)


class RandomCompressor(TokenDropCompressor):
    """Keeps positions drawn without replacement, the same in every process for the same seed."""

    name: ClassVar[str] = "random"

    def score(self, layer: LayerDescriptor, keys: Tensor, values: Tensor, context: CompressContext) -> Tensor:
        generator = torch.Generator().manual_seed(self.options.seed * 1_000_003 + layer.index)
        return torch.rand(keys.shape[:2], generator=generator)


@dataclass(frozen=True)
class AdversarialOptions:
    """Seed of the noise."""

    seed: int = option(0, help="seed of the noise", ge=0)


class NoiseCodec(Codec):
    """Keeps one byte of each row, a hash, and decodes it to noise of spread 8 that only the hash decides."""

    def __init__(self, width: int, seed: int) -> None:
        self.table = torch.randn(256, width, generator=torch.Generator().manual_seed(seed)) * 8

    def encode(self, rows: Tensor) -> Codes:
        bits = rows.float().view(torch.int32).to(torch.int64)
        return {"lot": (bits.sum(-1) % 251).to(torch.uint8)}

    def decode(self, codes: Codes) -> Tensor:
        return self.table.to(codes["lot"].device)[codes["lot"].long()]


class AdversarialCompressor(QuantizationCompressor):
    """Returns noise: the worst drafter there is. Output must not change, only speed."""

    name: ClassVar[str] = "adversarial"

    def key_codec(self, layer: LayerDescriptor) -> Codec:
        return NoiseCodec(layer.head_dim, (self.options.seed * 1_000_003 + layer.index) * 2)

    def value_codec(self, layer: LayerDescriptor) -> Codec:
        return NoiseCodec(layer.value_dim, (self.options.seed * 1_000_003 + layer.index) * 2 + 1)


@hookimpl
def vericache_compressors() -> Iterable[CompressorSpec]:
    """The compressors of this module."""
    yield CompressorSpec(
        name="identity",
        factory=IdentityCompressor,
        options=IdentityOptions,
        kind="token-drop",
        api_version=API_VERSION,
        summary="keeps everything; every draft is accepted",
    )
    yield CompressorSpec(
        name="random",
        factory=RandomCompressor,
        options=RandomOptions,
        kind="token-drop",
        api_version=API_VERSION,
        summary="keeps random positions; the floor for token droppers",
    )
    yield CompressorSpec(
        name="adversarial",
        factory=AdversarialCompressor,
        options=AdversarialOptions,
        kind="quantization",
        api_version=API_VERSION,
        summary="returns noise; drafts are rejected, output stays right",
    )
