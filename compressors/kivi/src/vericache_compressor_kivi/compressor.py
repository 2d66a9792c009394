"""The compressor: two codecs and two boundaries."""

from __future__ import annotations

import math
from typing import ClassVar

from vericache_compressor_kivi.codecs import KeyCodec, ValueCodec
from vericache_compressor_kivi.options import KiviOptions
from vericache_core import Codec, LayerDescriptor, QuantizationCompressor
from vericache_core.errors import OptionError


class KiviCompressor(QuantizationCompressor):
    """KIVI (arXiv 2402.02750, section 3.2 and algorithm 1) over post-rotary keys.

    With ``T`` tokens and residual length ``R`` the first ``floor(T / R) * R`` keys and the first
    ``max(0, T - R)`` values are codes, the rest is exact: keys move in blocks of ``R``, values one by one.
    Codes are written once; appending one token at a time, several, or all at once gives the same bytes.

    Bytes of one layer and KV head, with ``e`` bytes per element of the model's dtype, key and value widths
    ``bk`` and ``bv`` bits, groups of ``G``, ``nK`` and ``nV`` encoded keys and values::

        nK*D*bk/8 + (nK/G)*D*2e + (T - nK)*D*e + nV*D*bv/8 + nV*(D/G)*2e + (T - nV)*D*e

    Only layers with full attention are compressed.

    Raises:
        OptionError: ``group`` does not divide the value head dimension.
        CompressorFault: NaN or infinity in keys or values.
    """

    name: ClassVar[str] = "kivi"
    options: KiviOptions

    def __init__(self, options: KiviOptions | None = None) -> None:
        super().__init__(options or KiviOptions())

    def key_codec(self, layer: LayerDescriptor) -> Codec:
        return KeyCodec(self.options.key_width, self.options.group, f"{self.name}: keys of layer {layer.index}")

    def value_codec(self, layer: LayerDescriptor) -> Codec:
        group = self.options.group
        if layer.value_dim % group:
            raise OptionError(
                f"{self.name}: group={group} does not divide the value head dimension {layer.value_dim} of layer {layer.index}",
                hint=_fitting(math.gcd(layer.value_dim, group), min(self.options.key_width, self.options.value_width)),
            )
        return ValueCodec(self.options.value_width, group, f"{self.name}: values of layer {layer.index}")

    def key_boundary(self, tokens: int) -> int:
        return tokens // self.options.residual * self.options.residual

    def value_boundary(self, tokens: int) -> int:
        return max(0, tokens - self.options.residual)


def _fitting(common: int, bits: int) -> str:
    """Hint at the largest group that divides ``common`` and that the options allow."""
    legal = [group for group in range(4, common + 1) if common % group == 0 and group * bits % 8 == 0]
    return f"try group={legal[-1]}" if legal else "no group fits; use another compressor"
