"""The compressor contract, and two base classes that leave an author one idea to write.

All methods are pure: inputs are never changed, the same inputs give the same bytes in any process, with
any thread count, whatever else runs beside. A compressor can be slow or bad; it cannot make the output
wrong, because the full KV decides every token.
"""

from __future__ import annotations

import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from vericache_core.coded import Codec, CodedLayer, CodedRows
from vericache_core.context import CompressContext, Needs
from vericache_core.errors import CompressorFault, PayloadError
from vericache_core.index_map import HeadMap
from vericache_core.kv import CompressedKV, CompressedLayer, LayerDescriptor, PlainLayer, PrefixView, StoredLayer
from vericache_core.topk import stable_topk


@runtime_checkable
class Compressor(Protocol):
    """What the runtime calls. Subclass one of the bases below rather than writing this from nothing."""

    @property
    def name(self) -> str:
        """The registry name; a class attribute will do."""

    @property
    def needs(self) -> Needs:
        """What to gather during prefill for :class:`CompressContext`."""

    def supports(self, layer: LayerDescriptor) -> bool:
        """False keeps a layer uncompressed (exact, on the device) instead of running it silently wrong."""

    def compress(self, prefix: PrefixView, context: CompressContext) -> CompressedKV:
        """Compress the first ``prefix.tokens`` tokens of a request."""

    def extend(self, compressed: CompressedKV, rows: PrefixView, context: CompressContext) -> CompressedKV:
        """Fold verified tokens in; ``rows.start`` equals ``compressed.tokens``. Append only."""

    def rollback(self, compressed: CompressedKV, tokens: int, prefix: PrefixView | None = None) -> CompressedKV:
        """Drop the newest ``tokens`` tokens.

        With ``prefix`` (the remaining tokens of the full KV) the bytes are those before the matching
        ``extend``; without it, rows that exist only as codes stay codes.
        """

    def restore(
        self, tokens: int, layers: Sequence[StoredLayer | None], descriptors: Sequence[LayerDescriptor]
    ) -> CompressedKV:
        """Rebuild from what ``CompressedKV.to_payload`` wrote."""


class BaseCompressor(ABC):
    """Common part of the two bases: options, layer choice, payload header."""

    name: ClassVar[str]

    def __init__(self, options: Any = None) -> None:
        self.options = options

    @property
    def needs(self) -> Needs:
        return Needs()

    def supports(self, layer: LayerDescriptor) -> bool:
        return layer.kind == "full"

    def check_layers(self, layers: Sequence[LayerDescriptor]) -> None:  # noqa: B027  # by default nothing is refused
        """Refuse a model early: called once with all layers before anything is compressed.

        Override where options must fit the layers; layers that :meth:`supports` declines are no reason.

        Raises:
            OptionError: an option does not fit a layer; the message names both.
        """

    def options_json(self) -> dict[str, Any]:
        """Options as plain JSON values; written into every payload."""
        if self.options is None:
            return {}
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self.options)))
        return plain

    def extra(self) -> dict[str, Any]:
        """Facts beyond the options that decoding needs, such as an algorithm version."""
        return {}

    def _wrap(
        self, tokens: int, descriptors: Sequence[LayerDescriptor], layers: Sequence[CompressedLayer | None]
    ) -> CompressedKV:
        return CompressedKV(self.name, self.options_json(), tokens, tuple(descriptors), tuple(layers), self.extra())


class TokenDropCompressor(BaseCompressor):
    """Score -> select -> gather. Subclasses write :meth:`score`; the rest has sensible defaults.

    Kept counts: ``options.kept_tokens(tokens)`` where the options have it, never below the protected
    positions of a head (they always survive) and never zero. Ties go to the lower position. Tokens that
    arrive later through :meth:`extend` are all kept.
    """

    def score(self, layer: LayerDescriptor, keys: Tensor, values: Tensor, context: CompressContext) -> Tensor:
        """Importance ``[kv_heads, tokens]`` in float32, higher is kept.

        ``keys`` is ``[kv_heads, tokens, head_dim]``, ``values`` ``[kv_heads, tokens, value_dim]``, both in
        the model's dtype: cast to float32 first, low-precision scores are mostly ties.
        """
        raise NotImplementedError(f"{type(self).__name__} writes neither score() nor scores()")

    def protected(self, layer: LayerDescriptor, tokens: int, context: CompressContext) -> Tensor:
        """Positions that survive whatever their score, bool ``[tokens]``. Default: the context's spans."""
        mask = torch.zeros(tokens, dtype=torch.bool)
        for start, stop in context.protected:
            mask[start:stop] = True
        return mask

    def allocate(
        self, layers: Sequence[LayerDescriptor], scores: Sequence[Tensor], tokens: int, context: CompressContext
    ) -> list[list[int]]:
        """Kept count per layer and KV head. Default: the options' budget everywhere.

        ``scores`` holds ``[kv_heads, tokens]`` of the supported layers, in order, protected positions at
        ``+inf``. Override for budgets that differ by layer or head.
        """
        count = self.options.kept_tokens(tokens)
        return [[count] * layer.kv_heads for layer in layers]

    def compress(self, prefix: PrefixView, context: CompressContext) -> CompressedKV:
        return self.select(prefix, self.scores(prefix, context), context)

    def scores(self, prefix: PrefixView, context: CompressContext) -> dict[int, Tensor]:
        """Scores of all supported layers by layer number, float32 ``[kv_heads, tokens]`` on the CPU.

        They do not depend on the budget: keep them, and :meth:`select` gives any budget without scoring again.
        Override instead of :meth:`score` where all layers are scored together.
        """
        return {
            layer.index: self.score(layer, *prefix.rows(layer.index), context).detach().float().cpu()
            for layer in prefix.layers
            if self.supports(layer)
        }

    def select(self, prefix: PrefixView, scores: Mapping[int, Tensor], context: CompressContext) -> CompressedKV:
        """Spend the budget on the best scores and gather the rows.

        Raises:
            CompressorFault: a score is missing, of the wrong shape, or NaN.
        """
        layers = [layer for layer in prefix.layers if self.supports(layer)]
        ranked, floors = [], []
        for layer in layers:
            score = scores.get(layer.index)
            if score is None or score.shape != (layer.kv_heads, prefix.tokens):
                raise CompressorFault(
                    f"{self.name}: score of layer {layer.index} has shape {None if score is None else tuple(score.shape)}",
                    cause=f"expected (kv_heads, tokens) = {(layer.kv_heads, prefix.tokens)}",
                )
            if bool(torch.isnan(score).any()):
                raise CompressorFault(f"{self.name}: score of layer {layer.index} contains NaN")
            must = self.protected(layer, prefix.tokens, context)
            ranked.append(score.masked_fill(must, float("inf")))
            floors.append(int(must.sum()))
        counts = self.allocate(layers, ranked, prefix.tokens, context)
        stored: list[CompressedLayer | None] = [None] * len(prefix.layers)
        for layer, score, floor, per_head in zip(layers, ranked, floors, counts, strict=True):
            kept = [min(prefix.tokens, max(count, floor, 1)) for count in per_head]
            heads = [stable_topk(score[h], kept[h]) for h in range(layer.kv_heads)]
            stored[layer.index] = PlainLayer.gather(*prefix.rows(layer.index), HeadMap(heads, prefix.tokens))
        return self._wrap(prefix.tokens, prefix.layers, stored)

    def extend(self, compressed: CompressedKV, rows: PrefixView, context: CompressContext) -> CompressedKV:
        layers = [
            grown_plain(layer, *rows.rows(i)) if isinstance(layer, PlainLayer) else layer
            for i, layer in enumerate(compressed.layers)
        ]
        return self._wrap(compressed.tokens + rows.tokens, compressed.descriptors, layers)

    def rollback(self, compressed: CompressedKV, tokens: int, prefix: PrefixView | None = None) -> CompressedKV:
        left = remaining_tokens(compressed, tokens)
        layers = [cut_plain(layer, left) if isinstance(layer, PlainLayer) else layer for layer in compressed.layers]
        return self._wrap(left, compressed.descriptors, layers)

    def restore(
        self, tokens: int, layers: Sequence[StoredLayer | None], descriptors: Sequence[LayerDescriptor]
    ) -> CompressedKV:
        return self._wrap(tokens, descriptors, [None if stored is None else stored_plain(stored) for stored in layers])


class QuantizationCompressor(BaseCompressor):
    """Every token survives as codes; the newest may stay exact. Subclasses name the two codecs.

    Set ``layer_type`` to a subclass of ``CodedLayer`` to attend to the codes in a way of your own.
    Boundaries, residual window, append, rollback, byte accounting and payloads are inherited, and rows with
    NaN or infinity are refused with ``CompressorFault``.
    """

    layer_type: ClassVar[type[CodedLayer]] = CodedLayer

    @abstractmethod
    def key_codec(self, layer: LayerDescriptor) -> Codec:
        """Codec of the keys of this layer; raise ``OptionError`` if the layer does not fit the options."""

    @abstractmethod
    def value_codec(self, layer: LayerDescriptor) -> Codec:
        """Codec of the values of this layer."""

    def check_layers(self, layers: Sequence[LayerDescriptor]) -> None:
        for layer in filter(self.supports, layers):
            self.key_codec(layer)
            self.value_codec(layer)

    def key_boundary(self, tokens: int) -> int:
        """How many of the first ``tokens`` keys are codes; the rest is exact. Never decreases with ``tokens``."""
        return tokens

    def value_boundary(self, tokens: int) -> int:
        """The same for values."""
        return tokens

    def compress(self, prefix: PrefixView, context: CompressContext) -> CompressedKV:
        stored: list[CompressedLayer | None] = [None] * len(prefix.layers)
        for layer in prefix.layers:
            if self.supports(layer):
                everything = HeadMap.everything(prefix.tokens, layer.kv_heads)
                stored[layer.index] = self.encode_layer(layer, *prefix.rows(layer.index), everything)
        return self._wrap(prefix.tokens, prefix.layers, stored)

    def extend(self, compressed: CompressedKV, rows: PrefixView, context: CompressContext) -> CompressedKV:
        layers = [
            self.append_layer(layer, held, *rows.rows(layer.index)) if isinstance(held, CodedLayer) else held
            for layer, held in zip(compressed.descriptors, compressed.layers, strict=True)
        ]
        return self._wrap(compressed.tokens + rows.tokens, compressed.descriptors, layers)

    def rollback(self, compressed: CompressedKV, tokens: int, prefix: PrefixView | None = None) -> CompressedKV:
        left = remaining_tokens(compressed, tokens)
        layers: list[CompressedLayer | None] = []
        for index, layer in enumerate(compressed.layers):
            if isinstance(layer, CodedLayer):
                keys, values = (None, None) if prefix is None else prefix.rows(index)
                layers.append(self.cut_layer(layer, layer.surviving.cut(left), keys, values))
            else:
                layers.append(layer)
        return self._wrap(left, compressed.descriptors, layers)

    def restore(
        self, tokens: int, layers: Sequence[StoredLayer | None], descriptors: Sequence[LayerDescriptor]
    ) -> CompressedKV:
        return self._wrap(tokens, descriptors, [None if stored is None else self.restore_layer(stored) for stored in layers])

    # One layer at a time: what the methods above are made of, for callers whose rows are not a whole prefix.

    def encode_layer(self, layer: LayerDescriptor, keys: Tensor, values: Tensor, surviving: HeadMap) -> CodedLayer:
        """Encode ``keys`` and ``values`` ``[kv_heads, rows, ...]``, which are the positions that ``surviving`` names."""
        empty = self.layer_type(
            CodedRows(self.key_codec(layer), (), keys[:, :0].clone()),
            CodedRows(self.value_codec(layer), (), values[:, :0].clone()),
            HeadMap.everything(0, layer.kv_heads),
        )
        return self._appended(layer, empty, keys, values, surviving)

    def append_layer(self, layer: LayerDescriptor, held: CodedLayer, keys: Tensor, values: Tensor) -> CodedLayer:
        """Append rows ``[kv_heads, rows, ...]`` of the positions right behind those that ``held`` stands for."""
        return self._appended(layer, held, keys, values, held.surviving.grown(keys.shape[1]))

    def cut_layer(self, held: CodedLayer, surviving: HeadMap, keys: Tensor | None, values: Tensor | None) -> CodedLayer:
        """Keep the first rows, which are the positions of ``surviving``; ``keys`` and ``values`` are their exact rows."""
        rows = surviving.counts[0] if surviving.counts else 0
        return self.layer_type(
            held.keys.cut(rows, self.key_boundary(rows), keys),
            held.values.cut(rows, self.value_boundary(rows), values),
            surviving,
        )

    def restore_layer(self, stored: StoredLayer) -> CodedLayer:
        """Rebuild a layer from what a payload holds of it."""
        layer = stored.descriptor
        return self.layer_type.from_stored(stored, self.key_codec(layer), self.value_codec(layer))

    def _appended(
        self, layer: LayerDescriptor, held: CodedLayer, keys: Tensor, values: Tensor, surviving: HeadMap
    ) -> CodedLayer:
        # Checked on arrival, not when encoded: the error must not depend on where a boundary falls.
        require_finite(self.name, layer, keys=keys, values=values)
        rows = held.keys.tokens + keys.shape[1]  # boundaries count stored rows, which are fewer than tokens after dropping
        return self.layer_type(
            held.keys.appended(keys, self.key_boundary(rows)),
            held.values.appended(values, self.value_boundary(rows)),
            surviving,
        )


def require_finite(name: str, layer: LayerDescriptor, **parts: Tensor) -> None:
    """Refuse NaN and infinity: ``require_finite(self.name, layer, keys=keys)``.

    Raises:
        CompressorFault: an element is not finite; the message names compressor, part and layer.
    """
    for part, tensor in parts.items():
        if not tensor.numel():
            continue
        extremes = torch.stack(torch.aminmax(tensor.detach()))  # NaN comes through; one pass, no temporaries
        if not bool(torch.isfinite(extremes).all()):
            raise CompressorFault(f"{name}: {part} of layer {layer.index} contain NaN or infinity")


def grown_plain(layer: PlainLayer, keys: Tensor, values: Tensor) -> PlainLayer:
    """The layer with rows ``[kv_heads, rows, ...]`` appended to every head."""
    heads = [layer.head(h) for h in range(layer.surviving.kv_heads)]
    return PlainLayer(
        torch.cat([part for h, (k, _) in enumerate(heads) for part in (k, keys[h])]),
        torch.cat([part for h, (_, v) in enumerate(heads) for part in (v, values[h])]),
        layer.surviving.grown(keys.shape[1]),
    )


def cut_plain(layer: PlainLayer, tokens: int) -> PlainLayer:
    """The layer of the first ``tokens`` positions."""
    shorter = layer.surviving.cut(tokens)
    heads = [layer.head(h) for h in range(shorter.kv_heads)]
    return PlainLayer(
        torch.cat([k[:count] for (k, _), count in zip(heads, shorter.counts, strict=True)]),
        torch.cat([v[:count] for (_, v), count in zip(heads, shorter.counts, strict=True)]),
        shorter,
    )


def stored_plain(stored: StoredLayer) -> PlainLayer:
    """Plain rows out of a payload, checked against their descriptor."""
    layer, keys, values = stored.descriptor, stored.tensors["keys"], stored.tensors["values"]
    for part, width in ((keys, layer.head_dim), (values, layer.value_dim)):
        if part.dtype != layer.dtype or part.dim() != 2 or part.shape[1] != width:
            raise PayloadError(f"payload holds rows of {part.dtype} {tuple(part.shape)}, expected {layer.dtype} [..., {width}]")
    return PlainLayer(keys, values, stored.surviving)


def remaining_tokens(compressed: CompressedKV, tokens: int) -> int:
    """What is left of ``compressed`` without its newest ``tokens``; ``CompressorFault`` if it holds no so many."""
    if not 0 <= tokens <= compressed.tokens:
        raise CompressorFault(f"cannot roll back {tokens} tokens", cause=f"the compressed KV holds {compressed.tokens}")
    return compressed.tokens - tokens
