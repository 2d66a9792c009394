"""Faults in the use of what was given, and of global state."""

from __future__ import annotations

import torch
from torch import Tensor

from vericache_conform.mutants.healthy import Drop, Quant, spec
from vericache_conform.mutants.maps import changed_layers
from vericache_core.coded import CodedLayer
from vericache_core.context import CompressContext
from vericache_core.kv import CompressedKV, CompressedLayer, LayerDescriptor, PlainLayer, PrefixView


class MutatesInput(Drop):
    name = "mutates-input"

    def score(self, layer: LayerDescriptor, keys: Tensor, values: Tensor, context: CompressContext) -> Tensor:
        score = super().score(layer, keys, values, context)
        values[:, :1].add_(0.0)  # the numbers stay, but it was written to
        return score


class AliasesFullCache(Drop):
    """Where everything survives it stores the tensors it was given instead of copies."""

    name = "aliases-full-cache"

    def compress(self, prefix: PrefixView, context: CompressContext) -> CompressedKV:
        def change(index: int, layer: PlainLayer) -> CompressedLayer:
            keys, _ = prefix.rows(index)
            kept = layer.surviving.counts[0]
            if set(layer.surviving.counts) != {kept} or keys.shape[0] != 1:
                return _ViewLayer(layer, keys)
            return layer

        return changed_layers(super().compress(prefix, context), change)


class _ViewLayer(PlainLayer):
    """Keeps the source alive beside its own rows."""

    def __init__(self, layer: PlainLayer, source: Tensor) -> None:
        super().__init__(layer.flat_keys, layer.flat_values, layer.surviving)
        self.source = source


_ViewLayer.__name__ = PlainLayer.__name__  # it pretends to be one


class ChangesHeld(Quant):
    """extend writes into the compressed KV that it was given."""

    name = "changes-held"

    def extend(self, compressed: CompressedKV, rows: PrefixView, context: CompressContext) -> CompressedKV:
        made = super().extend(compressed, rows, context)
        for layer in compressed.layers:
            if isinstance(layer, CodedLayer):
                layer.keys.exact = layer.keys.exact + 0.0
                layer.keys.exact[:, :1] *= 1.5
        return made


class SeedsGlobally(Drop):
    name = "seeds-globally"

    def score(self, layer: LayerDescriptor, keys: Tensor, values: Tensor, context: CompressContext) -> Tensor:
        torch.manual_seed(layer.index)
        return super().score(layer, keys, values, context) + torch.rand(keys.shape[:2])


class ReadsGlobalSeed(Drop):
    name = "reads-global-seed"

    def score(self, layer: LayerDescriptor, keys: Tensor, values: Tensor, context: CompressContext) -> Tensor:
        draw = torch.Generator().manual_seed(torch.initial_seed() % 100_003)
        return super().score(layer, keys, values, context) * torch.rand(keys.shape[:2], generator=draw)


class AssumesContiguous(Drop):
    """Reads memory in order, whatever the strides say."""

    name = "assumes-contiguous"

    def score(self, layer: LayerDescriptor, keys: Tensor, values: Tensor, context: CompressContext) -> Tensor:
        if keys.stride(-1) != 1 or keys.stride(1) != keys.shape[2]:
            keys = torch.as_strided(keys, keys.shape, (keys.stride(0), 1, 1))
        return super().score(layer, keys, values, context)


class MixesHeads(Drop):
    """Takes the number of query heads for that of KV heads."""

    name = "mixes-heads"

    def score(self, layer: LayerDescriptor, keys: Tensor, values: Tensor, context: CompressContext) -> Tensor:
        score = super().score(layer, keys, values, context)
        return score if layer.group in (1, 2) else score.reshape(layer.heads, -1)


class NeedsLongPrompt(Drop):
    name = "needs-long-prompt"

    def score(self, layer: LayerDescriptor, keys: Tensor, values: Tensor, context: CompressContext) -> Tensor:
        assert keys.shape[1] > 2, "Query length should be greater than the window size"
        return super().score(layer, keys, values, context)


class PowersOfTwo(Drop):
    """Fails in the middle of a prompt where it should have refused the model."""

    name = "powers-of-two"

    def score(self, layer: LayerDescriptor, keys: Tensor, values: Tensor, context: CompressContext) -> Tensor:
        if layer.head_dim & (layer.head_dim - 1):
            raise RuntimeError(f"size of a transform must be a power of two, got {layer.head_dim}")
        return super().score(layer, keys, values, context)


class PrunesSliding(Drop):
    name = "prunes-sliding"

    def supports(self, layer: LayerDescriptor) -> bool:
        return True


class WrongDtype(Drop):
    """Stores float32 whatever the cache is."""

    name = "wrong-dtype"

    def compress(self, prefix: PrefixView, context: CompressContext) -> CompressedKV:
        def change(index: int, layer: PlainLayer) -> PlainLayer:
            if layer.flat_keys.dtype != torch.float16:
                return layer
            return PlainLayer(layer.flat_keys.float(), layer.flat_values.float(), layer.surviving)

        return changed_layers(super().compress(prefix, context), change)


class Raises(Drop):
    name = "raises"

    def compress(self, prefix: PrefixView, context: CompressContext) -> CompressedKV:
        if prefix.tokens:
            raise ZeroDivisionError("division by zero")
        return super().compress(prefix, context)


MUTATES_INPUT = spec(MutatesInput)
ALIASES_FULL_CACHE = spec(AliasesFullCache)
CHANGES_HELD = spec(ChangesHeld)
SEEDS_GLOBALLY = spec(SeedsGlobally)
READS_GLOBAL_SEED = spec(ReadsGlobalSeed)
ASSUMES_CONTIGUOUS = spec(AssumesContiguous)
MIXES_HEADS = spec(MixesHeads)
NEEDS_LONG_PROMPT = spec(NeedsLongPrompt)
POWERS_OF_TWO = spec(PowersOfTwo)
PRUNES_SLIDING = spec(PrunesSliding)
WRONG_DTYPE = spec(WrongDtype)
RAISES = spec(Raises)
