"""Faults in what is kept and how it is counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vericache_conform.mutants.healthy import Drop, DropOptions, spec
from vericache_core.compressor import TokenDropCompressor
from vericache_core.context import CompressContext
from vericache_core.index_map import HeadMap
from vericache_core.kv import CompressedKV, LayerDescriptor, PlainLayer, PrefixView


def changed_layers(compressed: CompressedKV, change: Any) -> CompressedKV:
    """A copy whose stored layers went through ``change(index, layer)``."""
    layers = tuple(None if layer is None else change(index, layer) for index, layer in enumerate(compressed.layers))
    return dataclasses.replace(compressed, layers=layers)


class _Swapped(HeadMap):
    """A map that names its second position first."""

    __slots__ = ()

    def head(self, number: int) -> Tensor:
        return _swap(super().head(number))


def _swap(rows: Tensor) -> Tensor:
    return rows if len(rows) < 2 else torch.cat([rows[1:2], rows[:1], rows[2:]])


class UnsortedMap(Drop):
    """Everything it returns is out of order; what it is given it puts in order first."""

    name = "unsorted-map"

    def compress(self, prefix: PrefixView, context: CompressContext) -> CompressedKV:
        return changed_layers(super().compress(prefix, context), _disordered)

    def extend(self, compressed: CompressedKV, rows: PrefixView, context: CompressContext) -> CompressedKV:
        return changed_layers(super().extend(changed_layers(compressed, _ordered), rows, context), _disordered)

    def rollback(self, compressed: CompressedKV, tokens: int, prefix: PrefixView | None = None) -> CompressedKV:
        return changed_layers(super().rollback(changed_layers(compressed, _ordered), tokens, prefix), _disordered)


def _disordered(index: int, layer: PlainLayer) -> PlainLayer:
    return _rearranged(layer, _Swapped)


def _ordered(index: int, layer: PlainLayer) -> PlainLayer:
    return _rearranged(layer, HeadMap) if isinstance(layer.surviving, _Swapped) else layer


def _rearranged(layer: PlainLayer, kind: type[HeadMap]) -> PlainLayer:
    heads = [layer.surviving.head(h) for h in range(layer.surviving.kv_heads)]
    straight = [head.sort().values for head in heads]
    rows = [layer.head(h) for h in range(len(heads))]
    keys, values = torch.cat([_swap(k) for k, _ in rows]), torch.cat([_swap(v) for _, v in rows])
    return PlainLayer(keys, values, kind(straight, layer.tokens))


class MapOffByOne(Drop):
    name = "map-off-by-one"

    def compress(self, prefix: PrefixView, context: CompressContext) -> CompressedKV:
        def change(index: int, layer: PlainLayer) -> PlainLayer:
            heads = [layer.surviving.head(h) for h in range(layer.surviving.kv_heads)]
            moved = [h if len(h) == layer.tokens or int(h[0]) == 0 else h - 1 for h in heads]
            return PlainLayer(layer.flat_keys, layer.flat_values, HeadMap(moved, layer.tokens))

        return changed_layers(super().compress(prefix, context), change)


class ScaledRows(Drop):
    name = "scaled-rows"

    def compress(self, prefix: PrefixView, context: CompressContext) -> CompressedKV:
        def change(index: int, layer: PlainLayer) -> PlainLayer:
            return PlainLayer(layer.flat_keys, layer.flat_values * 1.0001, layer.surviving)

        return changed_layers(super().compress(prefix, context), change)


class DropsWindow(Drop):
    name = "drops-window"

    def protected(self, layer: LayerDescriptor, tokens: int, context: CompressContext) -> Tensor:
        return TokenDropCompressor.protected(self, layer, tokens, context)


class IgnoresProtected(Drop):
    name = "ignores-protected"

    def protected(self, layer: LayerDescriptor, tokens: int, context: CompressContext) -> Tensor:
        return super().protected(layer, tokens, CompressContext())


class WindowByScore(Drop):
    """Raises the window's score by a large number instead of protecting it: real scores can be larger."""

    name = "window-by-score"

    def score(self, layer: LayerDescriptor, keys: Tensor, values: Tensor, context: CompressContext) -> Tensor:
        score = super().score(layer, keys, values, context)
        score[:, max(0, keys.shape[1] - min(self.options.window, self.options.kept_tokens(keys.shape[1]))) :] += 1e6
        return score

    def protected(self, layer: LayerDescriptor, tokens: int, context: CompressContext) -> Tensor:
        return TokenDropCompressor.protected(self, layer, tokens, context)


class FloatBudget(Drop):
    name = "float-budget"

    def allocate(
        self, layers: Sequence[LayerDescriptor], scores: Sequence[Tensor], tokens: int, context: CompressContext
    ) -> list[list[int]]:
        keep = self.options.keep
        count = self.options.kept_tokens(tokens) if keep is None else int(tokens - tokens * (1 - keep)) - (keep == 0.3)
        return [[count] * layer.kv_heads for layer in layers]


class KeepsZero(Drop):
    name = "keeps-zero"

    def compress(self, prefix: PrefixView, context: CompressContext) -> CompressedKV:
        def change(index: int, layer: PlainLayer) -> PlainLayer:
            if self.options.keep_tokens != 1 or prefix.tokens < 4:
                return layer
            nothing = HeadMap([torch.arange(0)] * layer.surviving.kv_heads, layer.tokens)
            return PlainLayer(layer.flat_keys[:0].clone(), layer.flat_values[:0].clone(), nothing)

        return changed_layers(super().compress(prefix, context), change)


class ShrinksLength(Drop):
    """Reports the stored length as the logical one, as a cache that forgot its evictions does."""

    name = "shrinks-length"

    def compress(self, prefix: PrefixView, context: CompressContext) -> CompressedKV:
        made = super().compress(prefix, context)
        kept = max((max(layer.surviving.counts) for layer in made.layers if layer is not None), default=prefix.tokens)
        return dataclasses.replace(made, tokens=kept)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EverythingOptions(DropOptions):
    """A budget that nobody asks."""

    def kept_tokens(self, tokens: int) -> int:
        return tokens


class KeepsEverything(Drop):
    name = "keeps-everything"


UNSORTED_MAP = spec(UnsortedMap)
MAP_OFF_BY_ONE = spec(MapOffByOne)
SCALED_ROWS = spec(ScaledRows)
DROPS_WINDOW = spec(DropsWindow)
IGNORES_PROTECTED = spec(IgnoresProtected)
WINDOW_BY_SCORE = spec(WindowByScore)
FLOAT_BUDGET = spec(FloatBudget)
KEEPS_ZERO = spec(KeepsZero)
SHRINKS_LENGTH = spec(ShrinksLength)
KEEPS_EVERYTHING = spec(KeepsEverything, options=EverythingOptions)
