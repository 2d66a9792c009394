"""The vocabulary of the SDK: layer descriptors, the full-KV view, the compressed KV.

Axis names everywhere: ``layers, kv_heads, heads, tokens, head_dim, rows``. Keys are those the model
attends to, so after rotary embedding. Nothing here knows of the runtime.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from vericache_core.attention.online import AttentionState
from vericache_core.attention.sources import CodedPart
from vericache_core.index_map import HeadMap


@dataclass(frozen=True, slots=True)
class LayerDescriptor:
    """What a compressor may know of one attention layer.

    Attributes:
        index: position in the model, from 0.
        kind: ``"full"`` or ``"sliding"`` attention.
        heads, kv_heads: query heads and KV heads; ``heads`` is a multiple of ``kv_heads``.
        head_dim, value_dim: width of a key row and of a value row.
        dtype: dtype of the KV rows.
        scaling: factor on query-key products (usually ``head_dim ** -0.5``).
        sliding_window: keys a row of a sliding layer sees, itself included; ``None`` for full layers.
        rope_theta: base of the rotary embedding, ``None`` when the model has none.
        rotary_dim: leading channels of a key that are rotated; 0 without rotary embedding.
    """

    index: int
    kind: Literal["full", "sliding"]
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    scaling: float
    sliding_window: int | None = None
    rope_theta: float | None = None
    rotary_dim: int = 0

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.heads // self.kv_heads

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V rows in this layer."""
        return self.kv_heads * (self.head_dim + self.value_dim) * self.dtype.itemsize


ReadRows = Callable[[int], tuple[Tensor, Tensor]]


class PrefixView:
    """Read-only view of a span of the full KV of one request.

    ``keys(i)`` and ``values(i)`` are private copies, so nothing a compressor does to them can reach the
    full KV; read one layer at a time and drop it to keep memory small.

    Args:
        layers: descriptor per layer.
        token_ids: the ids of the span, in order.
        read: layer number -> ``(keys [kv_heads, tokens, head_dim], values [kv_heads, tokens, value_dim])``.
        start: logical position of the first token of the span.
    """

    def __init__(self, layers: Sequence[LayerDescriptor], token_ids: Sequence[int], read: ReadRows, start: int = 0) -> None:
        self.layers = tuple(layers)
        self.token_ids = tuple(token_ids)
        self.start = start
        self._read = read

    @classmethod
    def from_tensors(
        cls,
        layers: Sequence[LayerDescriptor],
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        token_ids: Sequence[int] | None = None,
        start: int = 0,
    ) -> PrefixView:
        """A view over plain tensors (any strides), for tests and offline use; reads are copies."""
        ids = range(keys[0].shape[1]) if token_ids is None else token_ids
        return cls(layers, ids, lambda i: (keys[i].detach().clone(), values[i].detach().clone()), start)

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def positions(self) -> Tensor:
        """int64 ``[tokens]``, logical positions."""
        return torch.arange(self.start, self.start + self.tokens)

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """``(keys [kv_heads, tokens, head_dim], values [kv_heads, tokens, value_dim])`` of one layer."""
        return self._read(layer)

    def keys(self, layer: int) -> Tensor:
        """``[kv_heads, tokens, head_dim]``, contiguous or not, in the descriptor's dtype."""
        return self._read(layer)[0]

    def values(self, layer: int) -> Tensor:
        """``[kv_heads, tokens, value_dim]``."""
        return self._read(layer)[1]

    def nbytes(self) -> int:
        """Bytes of the full KV of this span."""
        return sum(layer.token_bytes for layer in self.layers) * self.tokens


class CompressedLayer(ABC):
    """Compressed KV of one layer: a prefix that query rows attend to."""

    surviving: HeadMap

    @property
    def tokens(self) -> int:
        """Logical length: tokens of the full KV that this stands for."""
        return self.surviving.tokens

    @abstractmethod
    def attend(self, query: Tensor, state: AttentionState) -> None:
        """Fold the whole compressed prefix into ``state``; every query row sees all of it.

        ``query`` is ``[heads, rows, head_dim]`` float32, already scaled.
        """

    def parts(self) -> Sequence[CodedPart] | None:
        """The same prefix as tables of where its codes lie, for a kernel that attends to them as they are.

        ``None`` where there is none, and :meth:`attend` has to be called. The parts are folded in order.
        """
        return None

    @abstractmethod
    def tensors(self) -> Mapping[str, Tensor]:
        """Everything stored, by name: for byte accounting and payloads. Without the surviving map."""

    def meta(self) -> dict[str, Any]:
        """JSON-able facts that :meth:`tensors` does not carry and a payload must."""
        return {}

    @property
    def nbytes(self) -> int:
        """Bytes actually held: storages, not views, each counted once; the surviving map included."""
        return storage_bytes([*self.tensors().values(), *self.surviving.storage()])


class PlainLayer(CompressedLayer):
    """Surviving rows in the model's dtype; counts may differ by KV head.

    Args:
        keys: ``[sum(counts), head_dim]``, head after head.
        values: ``[sum(counts), value_dim]``.
        surviving: which positions the rows are.
    """

    def __init__(self, keys: Tensor, values: Tensor, surviving: HeadMap) -> None:
        kept = sum(surviving.counts)
        if keys.shape[0] != kept or values.shape[0] != kept:
            raise ValueError(f"{kept} positions survive, but {keys.shape[0]} key and {values.shape[0]} value rows are stored")
        self.flat_keys, self.flat_values, self.surviving = keys, values, surviving

    @classmethod
    def gather(cls, keys: Tensor, values: Tensor, surviving: HeadMap) -> PlainLayer:
        """Copy the surviving rows out of ``keys`` and ``values`` ``[kv_heads, tokens, ...]``."""
        heads = [surviving.head(h).to(keys.device) for h in range(surviving.kv_heads)]
        return cls(
            torch.cat([keys[h].index_select(0, at) for h, at in enumerate(heads)]),
            torch.cat([values[h].index_select(0, at) for h, at in enumerate(heads)]),
            surviving,
        )

    def head(self, number: int) -> tuple[Tensor, Tensor]:
        """``(keys [kept, head_dim], values [kept, value_dim])`` of one KV head."""
        start = sum(self.surviving.counts[:number])
        stop = start + self.surviving.counts[number]
        return self.flat_keys[start:stop], self.flat_values[start:stop]

    def attend(self, query: Tensor, state: AttentionState) -> None:
        kv_heads, counts = self.surviving.kv_heads, self.surviving.counts
        if len(set(counts)) == 1:
            keys, values = (part.view(kv_heads, counts[0], -1) for part in (self.flat_keys, self.flat_values))
            state.fold(query, keys, values)
            return
        group = query.shape[0] // kv_heads
        for number in range(kv_heads):
            mine = slice(number * group, (number + 1) * group)
            part = AttentionState(state.top[mine], state.total[mine], state.acc[mine])
            keys, values = self.head(number)
            part.fold(query[mine], keys.unsqueeze(0), values.unsqueeze(0))
            state.top[mine], state.total[mine], state.acc[mine] = part.top, part.total, part.acc

    def tensors(self) -> Mapping[str, Tensor]:
        return {"keys": self.flat_keys, "values": self.flat_values}


@dataclass(frozen=True, eq=False)
class StoredLayer:
    """One layer as a payload holds it."""

    descriptor: LayerDescriptor
    surviving: HeadMap
    tensors: Mapping[str, Tensor]
    meta: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class CompressedKV:
    """What a compressor returns for a prefix.

    Attributes:
        compressor: registry name.
        options: JSON-able options, enough to rebuild the compressor.
        tokens: logical length of the prefix.
        descriptors: per layer what was compressed.
        layers: per layer the compressed rows, or ``None`` where the compressor declines the layer and the
            runtime keeps the exact rows.
        extra: further JSON-able facts that decoding needs (seed, algorithm version).
    """

    compressor: str
    options: Mapping[str, Any]
    tokens: int
    descriptors: tuple[LayerDescriptor, ...]
    layers: tuple[CompressedLayer | None, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)

    def layer(self, index: int) -> CompressedLayer | None:
        return self.layers[index]

    @property
    def surviving(self) -> tuple[HeadMap | None, ...]:
        """The surviving-index map, layer by layer."""
        return tuple(None if layer is None else layer.surviving for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes held by all layers, measured from storages; a storage shared by layers counts once."""
        held = [layer for layer in self.layers if layer is not None]
        return storage_bytes(part for layer in held for part in (*layer.tensors().values(), *layer.surviving.storage()))

    def residual(self, layer: int) -> tuple[Tensor, ...] | None:
        """Per KV head the positions that are missing here to rebuild the full rows exactly.

        ``None`` when the stored rows are not exact copies (quantization): then all rows are missing.
        """
        stored = self.layers[layer]
        if not isinstance(stored, PlainLayer):
            return None
        return tuple(stored.surviving.dropped(h) for h in range(stored.surviving.kv_heads))

    def to_payload(self) -> bytes:
        """Self-describing safetensors bytes; see :mod:`vericache_core.payload`."""
        from vericache_core.payload import dump_compressed

        return dump_compressed(self)

    @staticmethod
    def from_payload(data: bytes) -> CompressedKV:
        """Rebuild from bytes alone: the header names the compressor, the registry finds it.

        Raises:
            PayloadError: truncated, corrupt, of another version, or inconsistent.
            UnknownCompressorError: the compressor is not installed here.
        """
        from vericache_core.payload import load_compressed

        return load_compressed(data)

    def check_integrity(self) -> None:
        """Raise ``ValueError`` unless every layer stands for ``tokens`` tokens with a sound map."""
        for index, layer in enumerate(self.layers):
            if layer is None:
                continue
            layer.surviving.check_integrity()
            if layer.tokens != self.tokens:
                raise ValueError(f"layer {index} stands for {layer.tokens} tokens, the whole for {self.tokens}")
            if self.tokens and min(layer.surviving.counts) < 1:
                raise ValueError(f"layer {index} keeps nothing in at least one KV head")


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors`` (a view of a large tensor counts whole)."""
    held = [(tensor.device, tensor.untyped_storage()) for tensor in tensors if tensor.numel()]
    return sum({(device, storage.data_ptr()): storage.nbytes() for device, storage in held}.values())
