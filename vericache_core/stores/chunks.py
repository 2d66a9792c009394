"""Chunks of full KV: which pages a chunk holds, out of a cache into bytes and back.

A chunk is a fixed number of tokens, a multiple of the page, of all layers. Layers with full attention give all their
pages. A layer with a sliding window gives only those that a reader may need who continues at the end of the chunk, or
one row before (a prompt that is stored whole recomputes its last token).

What a prefix has behind its last whole chunk is its tail: a chunk with fewer tokens, whose last page may be part full.
Functions that take a chunk take its tokens where it may be one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from vericache_core.cache.full import FullKV
from vericache_core.cache.pages import PAGE, Extent, pages_for
from vericache_core.kv import LayerDescriptor
from vericache_core.stores.blobs import Buffer
from vericache_core.stores.format import TensorSpec

NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""Dtypes by their safetensors names."""


def stored_pages(layer: LayerDescriptor, number: int, chunk: int, tokens: int | None = None) -> range:
    """Pages of ``layer`` that chunk ``number`` of ``chunk`` tokens holds, or a tail of ``tokens`` in its place."""
    start = number * chunk
    stop = start + (chunk if tokens is None else tokens)
    if layer.sliding_window is not None:
        start = max(start, stop - layer.sliding_window)
    return range(start // PAGE, pages_for(stop))


def usable(layers: Sequence[LayerDescriptor], tokens: int, chunk: int) -> int:
    """Most rows, ``tokens`` at most, that the chunks which cover ``tokens`` tokens can restore in every layer."""
    if all(_covers(layer, tokens, chunk) for layer in layers if layer.sliding_window is not None):
        return tokens
    return tokens // chunk * chunk


def _covers(layer: LayerDescriptor, tokens: int, chunk: int) -> bool:
    """Whether all pages are stored that a sliding layer needs to continue after ``tokens`` rows."""
    assert layer.sliding_window is not None
    oldest = max(0, min(tokens - layer.sliding_window + 1, tokens - 1))  # the next row is written beside the last one
    needed = range(oldest // PAGE, pages_for(tokens))
    return all(page in stored_pages(layer, page * PAGE // chunk, chunk) for page in needed)


def chunk_specs(layers: Sequence[LayerDescriptor], number: int, chunk: int, tokens: int | None = None) -> dict[str, TensorSpec]:
    """Tensors of a chunk by name: ``<layer>/keys`` and ``<layer>/values``, whole pages as a cache holds them."""
    specs: dict[str, TensorSpec] = {}
    for layer in layers:
        pages, dtype = len(stored_pages(layer, number, chunk, tokens)), NAMES[layer.dtype]
        specs[f"{layer.index}/keys"] = TensorSpec(dtype, (pages, layer.kv_heads, layer.head_dim, PAGE))
        specs[f"{layer.index}/values"] = TensorSpec(dtype, (pages, layer.kv_heads, PAGE, layer.value_dim))
    return specs


def capture(full: FullKV, number: int, chunk: int, tokens: int | None = None) -> dict[str, tuple[TensorSpec, Buffer]]:
    """Copies of a chunk's pages; every row of it must have been written. Rows behind a tail come as zeros.

    Raises:
        SwapError: the tier could not be read.
        IndexError: a sliding window has left the chunk behind.
    """
    specs = chunk_specs(full.layers, number, chunk, tokens)
    rest = (tokens or 0) % PAGE
    tensors: dict[str, tuple[TensorSpec, Buffer]] = {}
    for layer in full.layers:
        copy = full.copy_pages(layer.index, stored_pages(layer, number, chunk, tokens))
        if rest:  # drafts of others may lie there, which are nobody's business
            copy.keys[-1, :, :, rest:] = 0
            copy.values[-1, :, rest:] = 0
        for name, data in zip(("keys", "values"), _memory(copy), strict=True):
            tensors[f"{layer.index}/{name}"] = (specs[f"{layer.index}/{name}"], data)
    return tensors


def restore(
    full: FullKV,
    layers: Sequence[LayerDescriptor],
    number: int,
    chunk: int,
    tensors: Mapping[str, memoryview],
    tokens: int | None = None,
) -> None:
    """Put a chunk's pages of ``layers`` into a cache; they count when it adopts them.

    Raises:
        SwapError: the tier could not be written.
    """
    for layer in layers:
        first = stored_pages(layer, number, chunk, tokens).start
        full.restore_pages(layer.index, first, tensors[f"{layer.index}/keys"], tensors[f"{layer.index}/values"])


def window_chunks(layers: Sequence[LayerDescriptor], chunk: int) -> int:
    """Newest chunks that sliding windows reach back into, the last one included; 0 without sliding windows."""
    windows = [layer.sliding_window for layer in layers if layer.sliding_window is not None]
    return 1 + -(-max(windows) // chunk) if windows else 0


def _memory(extent: Extent) -> tuple[memoryview, memoryview]:
    keys, values = (part.view(torch.uint8).numpy().reshape(-1).data for part in (extent.keys, extent.values))
    return memoryview(keys), memoryview(values)
