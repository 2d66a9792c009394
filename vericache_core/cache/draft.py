"""Draft KV of one request: compressed prefix plus exact tail, all of it on the device.

Per layer one of three forms:

- plain rows (token dropping): survivors and tail share the pages, survivors first, so an attention that
  keeps everything runs the very arithmetic of the full cache;
- codes (quantization): the compressed layer attends to its prefix itself, the pages hold the tail only;
- uncompressed (sliding windows, layers the compressor declines): the full KV's own device pages, whose
  rows beyond its length serve as scratch for drafted rows.

The tail counts rows after the prefix. Drafted rows are provisional: a verify takes them back and the
verifier's own rows replace them. Without a full KV here (the verifier is on another machine) every layer has
pages of its own, and drafted rows of accepted tokens stay as they are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from vericache_core.cache.full import FullKV
from vericache_core.cache.move import Index
from vericache_core.cache.pages import PagedRows
from vericache_core.cache.streaming import absent
from vericache_core.errors import CompressorFault
from vericache_core.index_map import HeadMap
from vericache_core.kv import CompressedKV, CompressedLayer, LayerDescriptor, PlainLayer, PrefixView, storage_bytes


class DraftKV:
    """Build with :meth:`build`, or layer by layer with :meth:`receive`; attributes are for reading.

    Attributes:
        prefix_tokens: tokens of the prefix.
        tail: exact rows after the prefix.
        drafted: provisional rows after the tail.
    """

    def __init__(
        self,
        layers: Sequence[LayerDescriptor],
        device: torch.device,
        compressed: CompressedKV,
        full: FullKV | None = None,
    ) -> None:
        self._layers, self.device, self._full = tuple(layers), device, full
        self.compressor = compressed.compressor
        self._header = dataclasses.replace(compressed, layers=())
        self.prefix_tokens = compressed.tokens
        self.tail = 0
        self.drafted = 0
        self._coded: dict[int, CompressedLayer] = {}
        self._maps: dict[int, HeadMap] = {}
        self._pages: dict[int, PagedRows] = {}
        self._measured: int | None = None

    @classmethod
    def build(cls, full: FullKV, compressed: CompressedKV, compressed_layers: Sequence[int]) -> DraftKV:
        """Copy the surviving rows of ``full`` (the plugin's own copies are not trusted) and start an empty tail.

        ``compressed_layers`` are the layers the compressor may have changed; the others must be on the device.

        Raises:
            CompressorFault: the compressed KV does not fit the prefix.
        """
        if compressed.tokens != full.tokens or len(compressed.layers) != len(full.layers):
            raise CompressorFault(
                f"{compressed.compressor}: compressed KV of {compressed.tokens} tokens and {len(compressed.layers)} layers",
                cause=f"the prefix has {full.tokens} tokens and {len(full.layers)} layers",
            )
        try:
            compressed.check_integrity()
        except ValueError as error:
            raise CompressorFault(f"{compressed.compressor} returned a broken surviving-index map", cause=str(error)) from error
        draft = cls(full.layers, full.device, compressed, full)
        for index in compressed_layers:
            layer = compressed.layers[index]
            if layer is None:
                raise CompressorFault(f"{compressed.compressor} supports layer {index} but did not compress it")
            draft._add(index, layer)
            if isinstance(layer, PlainLayer):
                keys, values = full.read(index, 0, full.tokens)
                draft._fill(index, functools.partial(_picked, keys, values))
        return draft

    def receive(self, index: int, layer: CompressedLayer) -> None:
        """Take in one layer where there is no full KV: plain survivors are its own, checked by who received them.

        Raises:
            CompressorFault: it does not fit the model.
        """
        assert self._full is None
        if layer.tokens != self.prefix_tokens:
            raise CompressorFault(f"layer {index} stands for {layer.tokens} tokens, the prefix has {self.prefix_tokens}")
        self._add(index, layer)
        if isinstance(layer, PlainLayer):
            self._fill(index, lambda head, _: layer.head(head))

    def receive_exact(self, index: int, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take in the exact rows from ``first`` to the end of the prefix of a layer that the compressor declined.

        ``keys`` is ``[kv_heads, n, head_dim]``, ``values`` ``[kv_heads, n, value_dim]``.
        """
        assert self._full is None
        descriptor = self._layers[index]
        pages = self._pages[index] = PagedRows(descriptor, self.device)
        self._maps[index] = HeadMap.everything(self.prefix_tokens, descriptor.kv_heads)
        pages.write(np.full(descriptor.kv_heads, first, dtype=np.int64), keys.to(self.device), values.to(self.device))
        pages.lengths = np.full(descriptor.kv_heads, self.prefix_tokens, dtype=np.int64)
        pages.release_before(first)

    def twin(self) -> DraftKV:
        """Another draft KV of the same prefix, for another request. Full pages, codes, maps are shared, and counted here."""
        assert self.tail == self.drafted == 0, "only a prefix can be shared"
        other = self.bare_twin()
        for index in self._pages:
            other.share(index, self)
        return other

    def bare_twin(self) -> DraftKV:
        """A :meth:`twin` that has no layer yet; :meth:`share` gives it one."""
        assert self._full is None
        other = DraftKV(self._layers, self.device, dataclasses.replace(self._header, tokens=self.prefix_tokens))
        other._measured = 0
        return other

    def share(self, index: int, other: DraftKV) -> None:
        """Take in one layer of the prefix of ``other``, which is complete there."""
        self._maps[index] = other._maps[index]
        if index in other._coded:
            self._coded[index] = other._coded[index]
        pages = self._pages[index] = PagedRows(self._layers[index], self.device)
        pages.begin_with(other._pages[index], other._pages[index].lengths)

    def _add(self, index: int, layer: CompressedLayer) -> None:
        """Take in the map and the codes of a layer; :meth:`_fill` its rows if it is plain."""
        descriptor = self._layers[index]
        if layer.surviving.kv_heads != descriptor.kv_heads:
            raise CompressorFault(
                f"{self.compressor}: layer {index} maps {layer.surviving.kv_heads} KV heads",
                cause=f"the model has {descriptor.kv_heads}",
            )
        pages = PagedRows(descriptor, self.device)
        # A map of our own: the full KV is put together from what it says, and a plugin may still hold the other one.
        surviving = HeadMap([layer.surviving.head(h) for h in range(descriptor.kv_heads)], layer.surviving.tokens)
        self._pages[index], self._maps[index] = pages, surviving
        if not isinstance(layer, PlainLayer):
            self._coded[index] = layer

    def _fill(self, index: int, rows: Callable[[int, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Store the surviving rows; ``rows(head, positions)`` gives ``(keys [n, head_dim], values [n, value_dim])``."""
        pages, surviving = self._pages[index], self._maps[index]
        pages.reserve(max(surviving.counts))
        for head in range(surviving.kv_heads):
            pages.put_head(head, *rows(head, surviving.head(head).to(self.device)))
        pages.lengths = np.array(surviving.counts, dtype=np.int64)

    @property
    def tokens(self) -> int:
        """Logical length, provisional rows included: the position of the next drafted token's row."""
        return self.prefix_tokens + self.tail + self.drafted

    @property
    def device_bytes(self) -> int:
        """Bytes of survivors, codes, maps and tail, measured; without the uncompressed layers."""
        if self._measured is None:  # codes and maps change with a fold only, and are asked for at every step
            coded = [part for layer in self._coded.values() for part in layer.tensors().values()]
            maps = [part for surviving in self._maps.values() for part in surviving.storage()]
            self._measured = storage_bytes([*coded, *maps])
        return self._measured + sum(pages.nbytes for pages in self._pages.values())

    def layer(self, index: int) -> tuple[PagedRows, Index, CompressedLayer | None]:
        """``(pages, index per KV head of the next row, compressed prefix that comes first)``."""
        if index in self._pages:
            pages = self._pages[index]
            return pages, pages.lengths, self._coded.get(index)
        assert self._full is not None
        pages = self._full.device_pages(index)
        return pages, pages.lengths + self.drafted, None

    def compressed_layers(self) -> tuple[int, ...]:
        return tuple(self._pages)

    def advance(self, rows: int) -> None:
        """Count ``rows`` provisional rows that a draft step wrote at the end."""
        self.drafted += rows
        for pages in self._pages.values():
            pages.grow_lengths(rows)

    def retract(self, rows: int | None = None) -> None:
        """Take the newest ``rows`` provisional rows back, by default every one."""
        rows = self.drafted if rows is None else rows
        assert rows <= self.drafted
        for pages in self._pages.values():
            pages.rollback(rows)
        self.drafted -= rows

    def keep(self, rows: int) -> None:
        """Let the oldest ``rows`` provisional rows be part of the tail as they are (no full KV here to replace them)."""
        assert self._full is None
        assert rows <= self.drafted
        self.tail, self.drafted = self.tail + rows, self.drafted - rows

    def accept(self, rows: int) -> None:
        """Count ``rows`` exact rows that a verify step wrote at the end of the tail."""
        assert self.drafted == 0
        self.tail += rows
        for pages in self._pages.values():
            pages.grow_lengths(rows)

    def current(self) -> CompressedKV:
        """The compressed prefix as the compressor knows it, for ``extend``; plain rows are copied out."""
        layers: list[CompressedLayer | None] = [None] * len(self._layers)
        for index, pages in self._pages.items():
            surviving = self._maps[index]
            if index in self._coded:
                layers[index] = self._coded[index]
                continue
            heads = [pages.rows(0, count, head) for head, count in enumerate(surviving.counts)]
            keys, values = torch.cat([k[0] for k, _ in heads]), torch.cat([v[0] for _, v in heads])
            layers[index] = PlainLayer(keys, values, surviving)
        return dataclasses.replace(self._header, tokens=self.prefix_tokens, layers=tuple(layers))

    @property
    def has_codes(self) -> bool:
        """Whether any layer is held as codes."""
        return bool(self._coded)

    def tail_view(self) -> PrefixView:
        """The exact tail as a read-only view, for ``Compressor.extend``."""

        def read(index: int) -> tuple[torch.Tensor, torch.Tensor]:
            pages = self._pages[index]
            first = pages.lengths - self.tail
            parts = [pages.rows(int(first[h]), int(pages.lengths[h]), h) for h in range(len(first))]
            return torch.cat([keys for keys, _ in parts]), torch.cat([values for _, values in parts])

        return PrefixView(self._layers, range(self.tail), read, start=self.prefix_tokens)

    def fold(self, extended: CompressedKV) -> bool:
        """Make ``extended`` (prefix plus tail) the new prefix without touching the full KV.

        Returns False, changing nothing, if a plain layer did anything but append the tail; the caller then
        builds a new draft KV from the full KV.

        Raises:
            CompressorFault: the extended KV does not fit.
        """
        assert self.drafted == 0
        if extended.tokens != self.prefix_tokens + self.tail:
            raise CompressorFault(f"{self.compressor}: extend gave {extended.tokens} tokens", cause=f"expected {self.tokens}")
        for index in self._pages:
            layer = extended.layers[index]
            if layer is None or isinstance(layer, PlainLayer) == (index in self._coded):
                raise CompressorFault(f"{self.compressor}: extend changed the kind of layer {index}")
            if index not in self._coded and layer.surviving != self._maps[index].grown(self.tail):
                return False
        for index, pages in self._pages.items():
            layer = extended.layers[index]
            assert layer is not None
            self._maps[index] = self._maps[index].grown(self.tail)
            if index in self._coded:
                self._coded[index] = layer
                pages.rollback(self.tail)
        self.prefix_tokens, self.tail, self._measured = extended.tokens, 0, None
        return True

    def held(self, layer: int) -> tuple[PagedRows, Sequence[tuple[Index, Index]]] | None:
        """Exact rows on the device; see :class:`vericache_core.cache.streaming.ExactRows`."""
        if layer not in self._pages:
            return None
        pages, surviving = self._pages[layer], self._maps[layer]
        tail = np.arange(self.prefix_tokens, self.prefix_tokens + self.tail, dtype=np.int64)
        per_head = []
        for head in range(surviving.kv_heads):
            kept = np.zeros(0, dtype=np.int64) if layer in self._coded else surviving.head(head).numpy()
            position = np.concatenate([kept, tail])
            per_head.append((np.arange(len(position), dtype=np.int64), position))
        return pages, per_head

    def missing(self, layer: int, tokens: int) -> Sequence[Index] | None:
        """Positions below ``tokens`` that no exact row on the device covers, per KV head."""
        held = self.held(layer)
        return None if held is None else absent(held[1], tokens)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless lengths agree with prefix, tail and full KV."""
        for index, pages in self._pages.items():
            pages.check_integrity()
            kept = np.zeros_like(pages.lengths) if index in self._coded else np.array(self._maps[index].counts)
            assert (pages.lengths == kept + self.tail + self.drafted).all(), (
                index,
                pages.lengths,
                kept,
                self.tail,
                self.drafted,
            )
            assert self._maps[index].tokens == self.prefix_tokens
        assert self._full is None or self.prefix_tokens + self.tail == self._full.tokens


def _picked(keys: torch.Tensor, values: torch.Tensor, head: int, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows ``at`` of one head of ``[kv_heads, tokens, width]``."""
    return keys[head].index_select(0, at), values[head].index_select(0, at)
