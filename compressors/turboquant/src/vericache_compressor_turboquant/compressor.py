"""The compressor: one codec for keys, one for values, and attention in the rotated space."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from vericache_compressor_turboquant.codecs import RotatedCodec, SpaceCodec, UniformCodec
from vericache_compressor_turboquant.options import TurboQuantOptions
from vericache_compressor_turboquant.rotation import Rotation, rotation
from vericache_core import Codec, LayerDescriptor, QuantizationCompressor
from vericache_core.attention.fused import fold_fused
from vericache_core.attention.online import AttentionState
from vericache_core.attention.sources import CodedPart, exact_of
from vericache_core.coded import CodedLayer, CodedRows
from vericache_core.errors import OptionError

ALGORITHM = 1
"""Version of rotation, codebook and layout; raised whenever the same codes would decode to something else."""


@dataclass(frozen=True)
class RotatedSpace:
    """The way of queries into the space of the keys' codes, and of sums of values out of that of theirs."""

    keys: Rotation | None
    values: Rotation | None

    def forward(self, query: Tensor) -> Tensor:
        return query if self.keys is None else self.keys.forward(query)

    def backward(self, acc: Tensor) -> Tensor:
        return acc if self.values is None else self.values.backward(acc)


class RotatedLayer(CodedLayer):
    """Attends to codes without rotating each row back: the query is rotated once, and the result once."""

    def attend(self, query: Tensor, state: AttentionState) -> None:
        keys, values = self.keys.codec, self.values.codec
        assert isinstance(keys, SpaceCodec)
        assert isinstance(values, SpaceCodec)
        turned = query if keys.rotation is None else keys.rotation.forward(query)
        part = AttentionState.fresh(state.top.shape[0], state.top.shape[1], state.acc.shape[2], query.device)
        if not fold_fused(turned, part, self.keys, self.values, exact=False):
            value_pieces = rotated_pieces(self.values, self.block)
            for key_rows in rotated_pieces(self.keys, self.block):
                part.fold(turned, key_rows, next(value_pieces))
                del key_rows  # a block must be gone before the next one is decoded
        if values.rotation is not None:
            part.acc = values.rotation.backward(part.acc)
        state.merge(part)
        state.fold(query, self.keys.exact, self.values.exact)

    def parts(self) -> Sequence[CodedPart] | None:
        keys, values = self.keys.coded_sources, self.values.coded_sources
        exact_keys, exact_values = exact_of(self.keys.exact), exact_of(self.values.exact)
        if keys is None or values is None or exact_keys is None or exact_values is None:
            return None
        assert isinstance(self.keys.codec, SpaceCodec)
        assert isinstance(self.values.codec, SpaceCodec)
        space = RotatedSpace(self.keys.codec.rotation, self.values.codec.rotation)
        return [CodedPart(keys, values, keys.tokens, space), CodedPart(exact_keys, exact_values, exact_keys.tokens)]


def rotated_pieces(rows: CodedRows, limit: int) -> Iterator[Tensor]:
    """Coded rows in order, in their rotated space, ``[kv_heads, at most limit, width]``."""
    assert isinstance(rows.codec, SpaceCodec)
    for segment in rows.segments:
        for first in range(0, segment.tokens, limit):
            yield rows.codec.rotated({name: part[:, first : first + limit] for name, part in segment.codes.items()})


class TurboQuantCompressor(QuantizationCompressor):
    """TurboQuant (arXiv 2504.19874) on post-rotary keys and on values.

    Bytes of one token and KV head: keys ``ceil(D*b/8) + 2``, in mode ``prod``
    ``ceil(D*(b-1)/8) + ceil(D/8) + 4``; values ``ceil(D*b/8) + 2``, or ``ceil(D*b/8) + 2e`` when uniform, with
    ``e`` bytes per element of the model's dtype. Rotations and codebooks are made from the seed and take none.

    Only layers with full attention are compressed.

    Raises:
        OptionError: ``rotation="hadamard"`` with a head dimension that is no power of two, or one below 4.
        CompressorFault: NaN or infinity in keys or values, or elements beyond float16 (root mean square).
    """

    name: ClassVar[str] = "turboquant"
    layer_type: ClassVar[type[CodedLayer]] = RotatedLayer
    options: TurboQuantOptions

    def __init__(self, options: TurboQuantOptions | None = None) -> None:
        super().__init__(options or TurboQuantOptions())

    def extra(self) -> dict[str, Any]:
        return {"algorithm": ALGORITHM}

    def key_codec(self, layer: LayerDescriptor) -> Codec:
        return self._rotated(layer, "keys", layer.head_dim, self.options.key_width)

    def value_codec(self, layer: LayerDescriptor) -> Codec:
        if self.options.values == "uniform":
            return UniformCodec(layer.value_dim, self.options.value_width, f"{self.name}: values of layer {layer.index}")
        return self._rotated(layer, "values", layer.value_dim, self.options.value_width)

    def key_boundary(self, tokens: int) -> int:
        return max(0, tokens - self.options.residual)

    def value_boundary(self, tokens: int) -> int:
        return max(0, tokens - self.options.residual)

    def _rotated(self, layer: LayerDescriptor, stream: str, width: int, bits: int) -> Codec:
        options = self.options
        if width < 4 or (options.rotation == "hadamard" and width & (width - 1)):
            raise OptionError(
                f"{self.name}: rotation={options.rotation} does not fit the head dimension {width} of layer {layer.index}",
                hint="try rotation=haar" if width >= 4 else "use another compressor",
            )
        sketched = options.mode == "prod" and stream == "keys"
        return RotatedCodec(
            width,
            bits,
            rotation(options.rotation, width, options.seed, stream),
            label=f"{self.name}: {stream} of layer {layer.index}",
            norm_correction=options.norm_correction,
            sketch=rotation(options.rotation, width, options.seed, "sketch") if sketched else None,
        )
