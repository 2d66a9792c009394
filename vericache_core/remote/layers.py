"""KV layer by layer as blobs: compressed layers, exact layers that a compressor declined, and rows that are missing.

A blob crosses the link in parts (see :func:`parts` and :class:`Assembly`), each within a message that carries a digest.
What a blob says is checked against the model and the announced prefix before it counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from vericache_core.cache.draft import DraftKV
from vericache_core.cache.full import FullKV
from vericache_core.cache.move import copy_rows
from vericache_core.cache.pages import PagedRows
from vericache_core.compressor import Compressor
from vericache_core.errors import CompressorFault, PayloadError, RemoteError
from vericache_core.index_map import HeadMap
from vericache_core.kv import CompressedKV, LayerDescriptor
from vericache_core.payload import dump_compressed, load_compressed
from vericache_core.remote.frames import CHUNK, Message

SLACK = 1 << 16
"""Bytes of headers that a blob may have beyond its rows."""


@dataclass(frozen=True)
class Blob:
    """One layer's bytes. ``kind`` is ``compressed``, ``exact`` (rows from ``first`` on) or ``missing``."""

    kind: str
    first: int
    data: bytes


def compressed_blobs(compressed: CompressedKV, full: FullKV) -> list[Blob]:
    """A blob for every layer; those that the compressor declined come exact, sliding windows only their window."""
    blobs = []
    for index, layer in enumerate(compressed.layers):
        if layer is None:
            blobs.append(exact_blob(full, index))
            continue
        alone = dataclasses.replace(compressed, descriptors=(compressed.descriptors[index],), layers=(layer,))
        blobs.append(Blob("compressed", 0, dump_compressed(alone)))
    return blobs


def exact_blob(full: FullKV, index: int) -> Blob:
    """All rows of a layer that later tokens may see."""
    window = full.layers[index].sliding_window if full.layers[index].kind == "sliding" else None
    first = 0 if window is None else max(0, full.tokens - window + 1)
    keys, values = full.read(index, first, full.tokens)
    return Blob("exact", first, _saved(keys, values))


def missing_blob(full: FullKV, index: int, held: HeadMap | None) -> Blob:
    """The rows of a layer that a drafter lacks whose surviving rows are ``held`` (None: it lacks all of them)."""
    if held is None or full.layers[index].kind == "sliding":
        return exact_blob(full, index)
    keys, values = full.read(index, 0, full.tokens)
    dropped = [held.dropped(head).to(keys.device) for head in range(held.kv_heads)]
    return Blob(
        "missing",
        0,
        _saved(
            torch.cat([keys[head].index_select(0, at) for head, at in enumerate(dropped)]),
            torch.cat([values[head].index_select(0, at) for head, at in enumerate(dropped)]),
        ),
    )


def most_bytes(layer: LayerDescriptor, tokens: int) -> int:
    """Bytes that a blob of this layer can have at most: codes are no larger than rows, but may come with scales."""
    return layer.token_bytes * tokens * 5 // 4 + SLACK


def parts(blobs: Iterator[tuple[int, Blob]]) -> Iterator[Message]:
    """Messages that carry blobs, ``(layer, blob)``, in order."""
    for layer, blob in blobs:
        size = len(blob.data)
        for offset in range(0, size, CHUNK):
            fields = {"layer": layer, "size": size, "offset": offset, "form": blob.kind, "first": blob.first}
            yield Message("part", fields, blob.data[offset : offset + CHUNK])
    yield Message("end", {})


class Assembly:
    """Puts blobs together again; every size is bounded before memory is taken.

    Args:
        layers: of the model; exactly one blob comes for each of ``expected``, in this order.
        tokens: of the prefix.
    """

    def __init__(self, layers: Sequence[LayerDescriptor], tokens: int, expected: Sequence[int]) -> None:
        self._layers, self._tokens, self._expected = layers, tokens, list(expected)
        self._buffer = bytearray()
        self._form: tuple[int, int, str] | None = None
        self.received = 0

    def take(self, message: Message) -> tuple[int, Blob] | None:
        """Take in a message; returns a layer that is complete with it.

        Raises:
            RemoteError: out of order, too large, or more than was expected.
        """
        if not self._expected:
            raise RemoteError("more layers came than the model has")
        index = self._expected[0]
        layer = message.number("layer", index, index)
        size = message.number("size", 1, most_bytes(self._layers[index], self._tokens))
        first = message.number("first", 0, self._tokens)
        message.number("offset", len(self._buffer), len(self._buffer))
        form = (size, first, message.text("form", 16))
        if self._form not in (None, form):
            raise RemoteError(f"parts of layer {index} contradict each other")
        if not message.payload or len(self._buffer) + len(message.payload) > size:
            raise RemoteError(f"parts of layer {index} do not add up", cause=f"{size} bytes were announced")
        self._form = form
        self._buffer += message.payload
        self.received += len(message.payload)
        if len(self._buffer) < size:
            return None
        blob = Blob(form[2], first, bytes(self._buffer))
        self._buffer, self._form = bytearray(), None
        self._expected.pop(0)
        return layer, blob

    def finish(self) -> None:
        """Raise ``RemoteError`` if layers are missing."""
        if self._expected or self._buffer:
            raise RemoteError("the stream of layers ended early", cause=f"layer {self._expected[0]} is not complete")


def take_layer(
    draft: DraftKV, layer: LayerDescriptor, blob: Blob, compressor: str, create: Callable[[str, Any], Compressor]
) -> None:
    """Add a received layer to a draft KV.

    Raises:
        RemoteError: it is not what was asked for, or does not fit the model.
    """
    try:
        if blob.kind == "exact":
            keys, values = rows_of(blob, layer, draft.prefix_tokens - blob.first)
            draft.receive_exact(layer.index, blob.first, keys, values)
            return
        if blob.kind != "compressed":
            raise RemoteError(f"layer {layer.index} came as {blob.kind[:16]!r}")
        held = load_compressed(blob.data, create, draft.device)
        if held.compressor != compressor or held.descriptors != (layer,) or held.layers[0] is None:
            raise RemoteError(f"layer {layer.index} of {held.compressor!r} was made for another model or compressor")
        draft.receive(layer.index, held.layers[0])
    except (PayloadError, CompressorFault) as error:
        raise RemoteError(f"layer {layer.index} of the compressed prefix is no good", cause=str(error)) from error


def rows_of(blob: Blob, layer: LayerDescriptor, tokens: int) -> tuple[Tensor, Tensor]:
    """``(keys [kv_heads, tokens, head_dim], values [kv_heads, tokens, value_dim])`` of an exact blob."""
    found = _loaded(blob.data)
    widths = {"keys": layer.head_dim, "values": layer.value_dim}
    for name, width in widths.items():
        part = found.get(name)
        if part is None or part.dtype != layer.dtype or part.shape != (layer.kv_heads, tokens, width):
            raise RemoteError(f"exact rows of layer {layer.index} do not fit the model")
    return found["keys"], found["values"]


def full_pages(layer: LayerDescriptor, blob: Blob, tokens: int, draft: DraftKV | None, device: torch.device) -> PagedRows:
    """Rows ``[0, tokens)`` of a layer out of what came over the link and what the draft KV holds exactly.

    Raises:
        RemoteError: rows are missing or of another form.
    """
    pages = PagedRows(layer, device)
    if blob.kind == "exact":
        keys, values = rows_of(blob, layer, tokens - blob.first)
        pages.write(np.full(layer.kv_heads, blob.first, dtype=np.int64), keys.to(device), values.to(device))
        pages.release_before(blob.first)
    else:
        held = None if draft is None else draft.held(layer.index)
        missing = None if draft is None else draft.missing(layer.index, tokens)
        if held is None or missing is None or blob.kind != "missing":
            raise RemoteError(f"layer {layer.index} came as {blob.kind[:16]!r}, and nothing of it is here")
        counts = [len(at) for at in missing]
        found = _loaded(blob.data)
        for name, width in (("keys", layer.head_dim), ("values", layer.value_dim)):
            part = found.get(name)
            if part is None or part.dtype != layer.dtype or part.shape != (sum(counts), width):
                raise RemoteError(f"missing rows of layer {layer.index} do not fit the model")
        came = PagedRows(layer, device)
        came.reserve(max(counts))
        pages.reserve(tokens)
        source, per_head = held
        start = 0
        for head, at in enumerate(missing):
            came.put_head(head, found["keys"][start : start + len(at)], found["values"][start : start + len(at)])
            copy_rows(came, np.arange(len(at), dtype=np.int64), pages, at, head)
            index, position = per_head[head]
            kept = position < tokens
            copy_rows(source, index[kept], pages, position[kept], head)
            start += len(at)
    pages.lengths = np.full(layer.kv_heads, tokens, dtype=np.int64)
    return pages


def _saved(keys: Tensor, values: Tensor) -> bytes:
    return save_tensors({"keys": keys.cpu().contiguous(), "values": values.cpu().contiguous()})


def _loaded(data: bytes) -> dict[str, Tensor]:
    try:
        return load_tensors(data)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise RemoteError("rows that came are no safetensors", cause=str(error)) from error
