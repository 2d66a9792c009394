"""Full KV of one request: paged, append-only, on a tier, with one rollback primitive.

A step that carries authoritative rows goes ``open`` -> per layer ``pages`` and ``wrote`` -> ``close_step``,
then ``advance`` by the rows that are to stay. Until ``advance`` everything written lies beyond ``tokens``
and counts for nothing, so a step that fails can simply be run again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from vericache_core.cache.pages import PAGE, Extent, PagedRows, by_page, fill_page
from vericache_core.cache.ring import SwapRing
from vericache_core.cache.streaming import StreamedLayers
from vericache_core.cache.tiers import DiskStore, HostStore, TierStore
from vericache_core.kv import LayerDescriptor


class FullKV(StreamedLayers):
    """See the module docstring.

    Args:
        layers: descriptors of the model.
        device: compute device.
        tier: ``"device"``, ``"host"`` or ``"disk"``.
        pinned: layers that stay on the device on every tier (uncompressed ones, sliding windows).
        ring: slots for streaming; needed on ``host`` and ``disk``.
        swap_dir: folder for the disk tier, default the system's temporary folder.

    Raises:
        SwapError: the tier cannot be set up.
    """

    def __init__(
        self,
        layers: Sequence[LayerDescriptor],
        device: torch.device,
        tier: str,
        pinned: Collection[int],
        ring: SwapRing,
        swap_dir: str | None = None,
    ) -> None:
        offloaded = [layer for layer in layers if tier != "device" and layer.index not in pinned]
        store: TierStore | None = None
        if offloaded:
            store = HostStore(offloaded, device, ring.link) if tier == "host" else DiskStore(offloaded, swap_dir, ring.link)
        super().__init__(layers, [layer.index for layer in offloaded], ring, store)
        self.device, self.tier, self.pinned = device, tier, frozenset(pinned)
        self._device = {layer.index: PagedRows(layer, device) for layer in layers if layer.index not in self._offloaded}

    def make_room(self, rows: int) -> None:
        """Make room for ``rows`` rows at once on layers that stay on the device; without it they grow page by page."""
        for pages in self._device.values():
            if pages.layer.kind == "full":
                pages.reserve(rows)

    def begin_with(self, source: Callable[[int], PagedRows], rows: int) -> None:
        """Start with ``rows`` exact rows that others hold (layer number -> pages); only while this is empty.

        On layers of the device whole pages are shared with the source; see :meth:`PagedRows.begin_with`.

        Raises:
            SwapError: the tier could not be written.
        """
        assert self.tokens == 0, "rows are held already"
        for index, pages in self._device.items():
            pages.begin_with(source(index), np.full(self.layers[index].kv_heads, rows, dtype=np.int64))
        for index in self._offloaded:
            assert self._store is not None
            self._store.write(self.layers[index], 0, rows, source(index))
        self.tokens = rows

    @property
    def device_bytes(self) -> int:
        """Device bytes that stay between steps (without ring slots)."""
        return sum(rows.nbytes for rows in self._device.values())

    def device_pages(self, layer: int) -> PagedRows:
        """Pages of a layer that stays on the device. Rows from ``tokens`` on are scratch for drafts."""
        return self._device[layer]

    def pages(self, layer: int) -> PagedRows:
        return self._device[layer] if layer in self._device else super().pages(layer)

    def wrote(self, layer: int, rows: int) -> None:
        if layer not in self._device:
            super().wrote(layer, rows)

    def advance(self, rows: int, keep_window: bool = False) -> None:
        """Keep the next ``rows`` rows that the last step wrote.

        ``keep_window`` holds on to rows that fall out of sliding windows, for a caller that will roll back.
        """
        self.tokens += rows
        for pages in self._device.values():
            pages.grow_lengths(rows)
            if pages.layer.sliding_window is not None and not keep_window:
                pages.release_before(self.tokens - pages.layer.sliding_window + 1)

    def rollback(self, rows: int) -> None:
        """Forget the newest ``rows`` rows.

        Raises:
            IndexError: more than are held, or rows of a sliding window would have to come back.
        """
        if not 0 <= rows <= self.tokens:
            raise IndexError(f"cannot roll back {rows} of {self.tokens} rows")
        done: list[PagedRows] = []
        try:
            for pages in self._device.values():
                pages.rollback(rows)
                done.append(pages)
        except IndexError:
            for pages in done:  # one layer cannot go back, so none does
                pages.grow_lengths(rows)
            raise
        self.tokens -= rows

    def read(self, layer: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Copies of committed rows: ``(keys [kv_heads, n, head_dim], values [kv_heads, n, value_dim])``.

        Raises:
            SwapError: the tier could not be read.
        """
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"rows {start}:{stop} of {self.tokens}")
        if layer in self._device:
            return self._device[layer].rows(start, stop)
        slot = self._ring.acquire(self.layers[layer], stop, self)
        try:
            assert self._store is not None
            self._store.read(self.layers[layer], stop, slot, None)
            return slot.rows(start, stop)
        finally:
            self._ring.release(slot)

    # -- whole pages, for stores that outlive the request --------------------------------------------

    def copy_pages(self, layer: int, pages: range) -> Extent:
        """A copy of whole pages of ``layer`` on the CPU; rows that a step has written may lie beyond ``tokens``.

        Raises:
            SwapError: the tier could not be read.
            IndexError: a page was released (sliding windows).
        """
        copy = Extent.allocate(self.layers[layer], len(pages), torch.device("cpu"))
        if layer in self._device:
            for number, page in enumerate(pages):
                keys, values = self._device[layer].page(page)
                copy.keys[number].copy_(keys)
                copy.values[number].copy_(values)
        else:
            assert self._store is not None
            self._store.copy_out(self.layers[layer], pages, copy)
        return copy

    def restore_pages(self, layer: int, first: int, keys: memoryview, values: memoryview) -> None:
        """Fill whole pages of ``layer`` from page ``first`` on with bytes in page layout; they count after :meth:`adopt`.

        A sliding window may begin at a later page than 0; whatever lies before counts as released.

        Raises:
            SwapError: the tier could not be written.
        """
        if layer not in self._device:
            assert self._store is not None
            self._store.copy_in(self.layers[layer], first, keys, values)
            return
        pages = self._device[layer]
        if not pages.capacity:
            pages.skip(first if pages.layer.kind == "sliding" else 0)
        parts = list(by_page(self.layers[layer], keys, values))
        pages.reserve((first + len(parts)) * PAGE)
        for page, part in enumerate(parts, first):
            fill_page(pages.page(page), *part)

    def adopt(self, tokens: int) -> None:
        """Let ``tokens`` rows count that were restored into an empty cache."""
        assert self.tokens == 0, "only an empty cache can adopt rows"
        self.advance(tokens)

    def drop_offloaded(self) -> None:
        """Give up every row that is not on the device, for a drafter whose full KV lives elsewhere."""
        self.close_step()
        self._offloaded = []
        if self._store is not None:
            self._store.close()
            self._store = None

    def close(self) -> None:
        """Give back every byte on every tier; safe to call twice."""
        self.close_step()
        self._device = {}
        if self._store is not None:
            self._store.close()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if the layers disagree on the length."""
        assert not self._slots, "a step is still open"
        for pages in self._device.values():
            pages.check_integrity()
            assert (pages.lengths == self.tokens).all(), (pages.lengths, self.tokens)
