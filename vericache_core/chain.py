"""A hybrid by composition: one compressor drops tokens, another quantizes what survives.

Written by name, ``compressor = "snapkv+kivi"``, with options by address: ``snapkv.keep = 0.25``, ``kivi.bits = 4``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vericache_core.coded import CodedLayer
from vericache_core.compressor import (
    BaseCompressor,
    Compressor,
    QuantizationCompressor,
    cut_plain,
    grown_plain,
    remaining_tokens,
    stored_plain,
)
from vericache_core.context import CompressContext, Needs
from vericache_core.errors import CompressorFault, UsageError
from vericache_core.index_map import HeadMap
from vericache_core.kv import CompressedKV, CompressedLayer, LayerDescriptor, PlainLayer, PrefixView, StoredLayer


class ChainCompressor:
    """Drops tokens with ``dropper``, then encodes the survivors with ``quantizer``.

    Survivors are encoded in ascending order of position, whatever order the dropper found them in: groups that
    run along tokens need neighbours. A quantizer's boundaries and residual count survivors, so the newest of them
    stay exact. Tokens that arrive later all survive and are appended to the codes.

    The codes of a layer are a rectangle, so its KV heads have to keep equally many tokens. Where the dropper
    shares its budget by need, a head that keeps fewer than the layer's largest count gets its newest dropped
    positions as well: more bytes, never fewer tokens than asked for.

    A layer that only one of the two supports gets that one's treatment.

    Raises:
        UsageError: the quantizer is not one of the base class, whose layers can be built one at a time.
    """

    def __init__(self, dropper: Compressor, quantizer: Compressor) -> None:
        name = f"{dropper.name}+{quantizer.name}"
        if not isinstance(quantizer, QuantizationCompressor) or type(quantizer).compress is not QuantizationCompressor.compress:
            raise UsageError(
                f"{quantizer.name!r} cannot come last in {name!r}",
                cause="only a QuantizationCompressor that leaves compress() to the base can encode survivors",
            )
        self.dropper, self.quantizer = dropper, quantizer
        self._name = name

    @property
    def name(self) -> str:
        return self._name

    @property
    def needs(self) -> Needs:
        return self.dropper.needs

    def supports(self, layer: LayerDescriptor) -> bool:
        return self.dropper.supports(layer) or self.quantizer.supports(layer)

    def check_layers(self, layers: Sequence[LayerDescriptor]) -> None:
        """Let both parts refuse a model early."""
        for part in (self.dropper, self.quantizer):
            if isinstance(part, BaseCompressor):
                part.check_layers(layers)

    def compress(self, prefix: PrefixView, context: CompressContext) -> CompressedKV:
        dropped = self.dropper.compress(prefix, context)
        layers: list[CompressedLayer | None] = []
        for layer, held in zip(prefix.layers, dropped.layers, strict=True):
            if not self.quantizer.supports(layer):
                layers.append(held)
                continue
            kept = HeadMap.everything(prefix.tokens, layer.kv_heads) if held is None else held.surviving
            layers.append(self._encoded(layer, rectangular(kept), *prefix.rows(layer.index)))
        return self._wrap(prefix.tokens, prefix.layers, layers)

    def extend(self, compressed: CompressedKV, rows: PrefixView, context: CompressContext) -> CompressedKV:
        layers: list[CompressedLayer | None] = []
        for layer, held in zip(compressed.descriptors, compressed.layers, strict=True):
            if isinstance(held, CodedLayer):
                layers.append(self.quantizer.append_layer(layer, held, *rows.rows(layer.index)))
            elif isinstance(held, PlainLayer):
                layers.append(grown_plain(held, *rows.rows(layer.index)))
            else:
                layers.append(held)
        return self._wrap(compressed.tokens + rows.tokens, compressed.descriptors, layers)

    def rollback(self, compressed: CompressedKV, tokens: int, prefix: PrefixView | None = None) -> CompressedKV:
        """Drop the newest ``tokens`` tokens.

        Heads that kept different positions of the prompt no longer keep equally many when a cut goes into it; the
        layer is then encoded anew from ``prefix``.

        Raises:
            CompressorFault: such a cut without ``prefix``.
        """
        left = remaining_tokens(compressed, tokens)
        layers: list[CompressedLayer | None] = []
        for layer, held in zip(compressed.descriptors, compressed.layers, strict=True):
            if isinstance(held, CodedLayer):
                layers.append(self._cut(layer, held, left, prefix))
            else:
                layers.append(cut_plain(held, left) if isinstance(held, PlainLayer) else held)
        return self._wrap(left, compressed.descriptors, layers)

    def restore(
        self, tokens: int, layers: Sequence[StoredLayer | None], descriptors: Sequence[LayerDescriptor]
    ) -> CompressedKV:
        rebuilt: list[CompressedLayer | None] = []
        for stored in layers:
            if stored is None:
                rebuilt.append(None)
            elif self.quantizer.supports(stored.descriptor):
                rebuilt.append(self.quantizer.restore_layer(stored))
            else:
                rebuilt.append(stored_plain(stored))
        return self._wrap(tokens, descriptors, rebuilt)

    def _cut(self, layer: LayerDescriptor, held: CodedLayer, left: int, prefix: PrefixView | None) -> CodedLayer:
        shorter = held.surviving.cut(left)
        equal = len(set(shorter.counts)) == 1 and (min(shorter.counts) > 0 or left == 0)
        if prefix is None:
            if not equal:
                raise CompressorFault(
                    f"{self.name}: cannot roll back to {left} tokens without the full KV",
                    cause=f"heads of layer {layer.index} then keep {shorter.counts} tokens",
                )
            return self.quantizer.cut_layer(held, shorter, None, None)
        keys, values = prefix.rows(layer.index)
        if not equal:
            return self._encoded(layer, rectangular(shorter), keys, values)
        return self.quantizer.cut_layer(held, shorter, gathered(keys, shorter), gathered(values, shorter))

    def _encoded(self, layer: LayerDescriptor, kept: HeadMap, keys: Tensor, values: Tensor) -> CodedLayer:
        return self.quantizer.encode_layer(layer, gathered(keys, kept), gathered(values, kept), kept)

    def _wrap(
        self, tokens: int, descriptors: Sequence[LayerDescriptor], layers: Sequence[CompressedLayer | None]
    ) -> CompressedKV:
        return CompressedKV(
            self.name, self._by_part("options_json"), tokens, tuple(descriptors), tuple(layers), self._by_part("extra")
        )

    def _by_part(self, method: str) -> dict[str, Any]:
        """What a method of :class:`BaseCompressor` says of each part, where it says anything."""
        parts = [part for part in (self.dropper, self.quantizer) if isinstance(part, BaseCompressor)]
        said: Mapping[str, Any] = {part.name: getattr(part, method)() for part in parts}
        return {name: facts for name, facts in said.items() if facts}


def rectangular(kept: HeadMap) -> HeadMap:
    """Let every head keep as many positions as the largest does, at least one: its newest dropped ones come back."""
    most = max(max(kept.counts, default=0), min(1, kept.tokens))
    if set(kept.counts) <= {most}:
        return kept
    heads = []
    for number, count in enumerate(kept.counts):
        dropped = kept.dropped(number)
        again = dropped[len(dropped) - (most - count) :]
        heads.append(torch.cat([kept.head(number), again]).sort().values)
    return HeadMap(heads, kept.tokens)


def gathered(rows: Tensor, kept: HeadMap) -> Tensor:
    """``[kv_heads, tokens, width]`` -> ``[kv_heads, kept, width]`` in ascending order of position."""
    if kept.complete:
        return rows
    return torch.stack([rows[h].index_select(0, kept.head(h).to(rows.device)) for h in range(kept.kv_heads)])
