"""Faults of memory: something of an earlier or another request is left."""

from __future__ import annotations

import os
import weakref
from typing import ClassVar

import torch
from torch import Tensor

from vericache_conform.mutants.healthy import Drop, DropOptions, Quant, RowCodec, spec
from vericache_core.coded import Codec, CodedLayer, CodedRows, Codes
from vericache_core.context import CompressContext
from vericache_core.kv import CompressedKV, CompressedLayer, LayerDescriptor, PrefixView


class RemembersCalls(Drop):
    """Every call on an instance scores a little differently."""

    name = "remembers-calls"
    calls = 0

    def compress(self, prefix: PrefixView, context: CompressContext) -> CompressedKV:
        made = super().compress(prefix, context)
        self.calls += 1
        return made

    def score(self, layer: LayerDescriptor, keys: Tensor, values: Tensor, context: CompressContext) -> Tensor:
        return super().score(layer, keys, values, context).roll(self.calls, -1)


class DirtyAfterAbort(Drop):
    """A flag that is only reset at the end of compress: an exception leaves it set."""

    name = "dirty-after-abort"
    busy = False

    def compress(self, prefix: PrefixView, context: CompressContext) -> CompressedKV:
        self.was_busy, self.busy = self.busy, True
        made = super().compress(prefix, context)
        self.busy = False
        return made

    def score(self, layer: LayerDescriptor, keys: Tensor, values: Tensor, context: CompressContext) -> Tensor:
        score = super().score(layer, keys, values, context)
        return -score if self.was_busy else score


class SeesBatchMates(Drop):
    """Scores depend on how many other requests are in the batch."""

    name = "sees-batch-mates"
    alive: ClassVar[weakref.WeakSet[SeesBatchMates]] = weakref.WeakSet()

    def __init__(self, options: DropOptions | None = None) -> None:
        super().__init__(options or DropOptions())
        self.alive.add(self)

    def score(self, layer: LayerDescriptor, keys: Tensor, values: Tensor, context: CompressContext) -> Tensor:
        score = super().score(layer, keys, values, context)
        return score.roll(len(self.alive), -1) if len(self.alive) > 2 else score


class LongestSoFar(Drop):
    """Scores depend on the longest prompt that the process has seen, up to 64 tokens: one check later it has settled."""

    name = "longest-so-far"
    longest: ClassVar[int] = 0

    def score(self, layer: LayerDescriptor, keys: Tensor, values: Tensor, context: CompressContext) -> Tensor:
        LongestSoFar.longest = max(LongestSoFar.longest, min(keys.shape[1], 64))
        return super().score(layer, keys, values, context).roll(LongestSoFar.longest, -1)


class TailOnInstance(Quant):
    """Keeps a fact of the last compress on the instance and uses it in extend."""

    name = "tail-on-instance"
    last = 0

    def compress(self, prefix: PrefixView, context: CompressContext) -> CompressedKV:
        self.last = prefix.token_ids[-1] if prefix.tokens else 0
        return super().compress(prefix, context)

    def extend(self, compressed: CompressedKV, rows: PrefixView, context: CompressContext) -> CompressedKV:
        if self.last == 0:
            return super().extend(compressed, rows, context)
        shift = float(self.last) * 1e-3

        def read(index: int) -> tuple[Tensor, Tensor]:
            keys, values = rows.rows(index)
            return keys + shift, values

        return super().extend(compressed, PrefixView(rows.layers, rows.token_ids, read, rows.start), context)


class ResidueOfQuestion(Quant):
    """After a rollback the next extend still sees the length of the question before."""

    name = "residue-of-question"
    asked = 0

    def rollback(self, compressed: CompressedKV, tokens: int, prefix: PrefixView | None = None) -> CompressedKV:
        made = super().rollback(compressed, tokens, prefix)
        self.asked = tokens if tokens > 30 else self.asked
        return made

    def extend(self, compressed: CompressedKV, rows: PrefixView, context: CompressContext) -> CompressedKV:
        asked = self.asked

        def read(index: int) -> tuple[Tensor, Tensor]:
            keys, values = rows.rows(index)
            return keys * (1 + asked / 100), values

        return super().extend(compressed, PrefixView(rows.layers, rows.token_ids, read, rows.start), context)


class HashOrder(Drop):
    """Depends on the order of a set of strings."""

    name = "hash-order"

    def score(self, layer: LayerDescriptor, keys: Tensor, values: Tensor, context: CompressContext) -> Tensor:
        order = {name: rank for rank, name in enumerate({"alpha", "beta", "gamma", "delta", "epsilon"})}
        return super().score(layer, keys, values, context).roll(order["alpha"] + 5 * order["beta"], -1)


class ProcessNumber(Drop):
    """Depends on the process it runs in."""

    name = "process-number"

    def score(self, layer: LayerDescriptor, keys: Tensor, values: Tensor, context: CompressContext) -> Tensor:
        return super().score(layer, keys, values, context).roll(os.getpid() % 41, -1)


class ThreadCount(Drop):
    """A reduction that is split by the number of threads."""

    name = "thread-count"

    def score(self, layer: LayerDescriptor, keys: Tensor, values: Tensor, context: CompressContext) -> Tensor:
        score = super().score(layer, keys, values, context)
        return score if torch.get_num_threads() == 1 else score.roll(1, -1)


class ForgetsOption(Quant):
    """The payload does not carry the width of a code."""

    name = "forgets-option"

    def key_codec(self, layer: LayerDescriptor) -> Codec:
        return _Shifted(self.options.bits, self.options.residual)

    def options_json(self) -> dict[str, object]:
        return {key: value for key, value in super().options_json().items() if key != "residual"}


class _Shifted(RowCodec):
    """Decodes with a number that only the options know."""

    def __init__(self, bits: int, shift: int) -> None:
        super().__init__(bits)
        self.shift = shift * 1e-4

    def encode(self, rows: Tensor) -> Codes:
        return super().encode(rows.float() - self.shift)

    def decode(self, codes: Codes) -> Tensor:
        return super().decode(codes) + self.shift


class RollbackOffByOne(Quant):
    """Across the border between codes and exact rows it takes one row too few back."""

    name = "rollback-off-by-one"

    def rollback(self, compressed: CompressedKV, tokens: int, prefix: PrefixView | None = None) -> CompressedKV:
        made = super().rollback(compressed, tokens, prefix)
        if prefix is None or tokens <= 5:
            return made
        layers: list[CompressedLayer | None] = []
        for layer in made.layers:
            if isinstance(layer, CodedLayer) and layer.keys.exact.shape[1] > 1:
                exact = layer.keys.exact.clone()
                exact[:, -1] = exact[:, -2]
                keys = CodedRows(layer.keys.codec, layer.keys.segments, exact)
                layers.append(CodedLayer(keys, layer.values, layer.surviving))
            else:
                layers.append(layer)
        return self._wrap(made.tokens, made.descriptors, layers)


class RollbackDoesNothing(Drop):
    """A trim that returns what it was given."""

    name = "rollback-does-nothing"

    def rollback(self, compressed: CompressedKV, tokens: int, prefix: PrefixView | None = None) -> CompressedKV:
        super().rollback(compressed, tokens, prefix)
        return compressed


class ByArrival(Quant):
    """Where the border lies depends on how many tokens came at once."""

    name = "by-arrival"
    hurry = False

    def extend(self, compressed: CompressedKV, rows: PrefixView, context: CompressContext) -> CompressedKV:
        self.hurry = rows.tokens == 2
        try:
            return super().extend(compressed, rows, context)
        finally:
            self.hurry = False

    def key_boundary(self, tokens: int) -> int:
        return tokens if self.hurry else super().key_boundary(tokens)


class Reencodes(Quant):
    """extend decodes what it holds and encodes it again, with everything else."""

    name = "re-encodes"

    def extend(self, compressed: CompressedKV, rows: PrefixView, context: CompressContext) -> CompressedKV:
        grown = super().extend(compressed, rows, context)
        layers: list[CompressedLayer | None] = []
        for descriptor, layer in zip(grown.descriptors, grown.layers, strict=True):
            if isinstance(layer, CodedLayer):
                codec = self.key_codec(descriptor)
                again = CodedRows(codec, (), layer.keys.exact[:, :0].clone())
                rough = layer.keys.decoded() * 0.999
                exact = layer.keys.exact
                again = again.appended(rough, layer.keys.encoded_tokens)
                keys = CodedRows(codec, again.segments, exact)
                layers.append(CodedLayer(keys, layer.values, layer.surviving))
            else:
                layers.append(layer)
        return self._wrap(grown.tokens, grown.descriptors, layers)


REMEMBERS_CALLS = spec(RemembersCalls)
DIRTY_AFTER_ABORT = spec(DirtyAfterAbort)
LONGEST_SO_FAR = spec(LongestSoFar)
SEES_BATCH_MATES = spec(SeesBatchMates)
TAIL_ON_INSTANCE = spec(TailOnInstance)
RESIDUE_OF_QUESTION = spec(ResidueOfQuestion)
HASH_ORDER = spec(HashOrder)
PROCESS_NUMBER = spec(ProcessNumber)
THREAD_COUNT = spec(ThreadCount)
FORGETS_OPTION = spec(ForgetsOption)
ROLLBACK_OFF_BY_ONE = spec(RollbackOffByOne)
ROLLBACK_DOES_NOTHING = spec(RollbackDoesNothing)
BY_ARRIVAL = spec(ByArrival)
RE_ENCODES = spec(Reencodes)
