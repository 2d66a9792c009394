"""Full KV of one request: paged, append-only, on a tier, with one rollback primitive.

A step that carries authoritative rows goes ``open`` -> per layer ``pages`` and ``wrote`` -> ``close_step``,
then ``advance`` by the rows that are to stay. Until ``advance`` everything written lies beyond ``tokens``
and counts for nothing, so a step that fails can simply be run again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from vericache_core.cache.move import Index, copy_rows
from vericache_core.cache.pages import PAGE, Extent, PagedRows, by_page, fill_page
from vericache_core.cache.ring import SwapRing
from vericache_core.cache.tiers import DiskStore, HostStore, TierStore
from vericache_core.kv import LayerDescriptor


class ExactRows(Protocol):
    """Exact rows that another cache already holds on the device (survivors and tail of the draft KV)."""

    def held(self, layer: int) -> tuple[PagedRows, Sequence[tuple[Index, Index]]] | None:
        """``(pages, per KV head (index in pages, logical position))``, or None if nothing exact is held."""

    def missing(self, layer: int, tokens: int) -> Sequence[Index] | None:
        """Per KV head the positions below ``tokens`` that are not held; None means all of them."""


class FullKV:
    """See the module docstring.

    Attributes:
        tokens: rows that count.
        unwanted: :meth:`abort` was called, so a load that fails is no fault of the tier.
        link_seconds: time that loads took so far, of ``link_bytes`` bytes, and ``waited_seconds`` that a step stood
            still for them; loads that did not come to their end are in none of them.
        loads: ``(layer, from, to)`` of the newest step's loads, by ``time.perf_counter``.

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
        self.layers, self.device, self.tier = tuple(layers), device, tier
        self.tokens = 0
        self.pinned = frozenset(pinned)
        offloaded = [layer for layer in layers if tier != "device" and layer.index not in pinned]
        self._offloaded = [layer.index for layer in offloaded]
        self._device = {layer.index: PagedRows(layer, device) for layer in layers if layer.index not in self._offloaded}
        self._ring = ring
        self._store: TierStore | None = None
        if offloaded:
            link = ring.link
            self._store = HostStore(offloaded, device, link) if tier == "host" else DiskStore(offloaded, swap_dir, link)
        self._slots: dict[int, tuple[PagedRows, Future[None]]] = {}
        self._queue: deque[int] = deque()
        self._stop = threading.Event()  # of the loads of one step; ``unwanted`` is of those of every step
        self.unwanted = False
        self._exact: ExactRows | None = None
        self._room = 0
        self.link_seconds = self.waited_seconds = 0.0
        self.link_bytes = 0
        self.loads: list[tuple[int, float, float]] = []

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
    def offloaded(self) -> tuple[int, ...]:
        """Layers whose rows rest on another tier."""
        return tuple(self._offloaded)

    @property
    def device_bytes(self) -> int:
        """Device bytes that stay between steps (without ring slots)."""
        return sum(rows.nbytes for rows in self._device.values())

    @property
    def tier_bytes(self) -> int:
        return 0 if self._store is None else self._store.nbytes

    @property
    def moved_bytes(self) -> int:
        """Bytes swapped in so far."""
        return 0 if self._store is None else self._store.moved_bytes

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that the device gave to the tier so far; what a prefix store gave to it is not among them."""
        return 0 if self._store is None else self._store.written_bytes

    def device_pages(self, layer: int) -> PagedRows:
        """Pages of a layer that stays on the device. Rows from ``tokens`` on are scratch for drafts."""
        return self._device[layer]

    def open(self, rows: int, exact: ExactRows | None = None) -> None:
        """Prepare a step that appends up to ``rows`` rows; loading of the first layers starts now.

        ``exact`` names rows that are on the device already and need not move.
        """
        self.close_step()
        self._stop = threading.Event()
        if self.unwanted:  # read after the event is in place: whoever aborts does it the other way round
            self._stop.set()
        self.loads = []
        self._room, self._exact = rows, exact
        self._queue = deque(self._offloaded)
        for _ in range(self._ring.layers):
            self._load_next()

    def pages(self, layer: int) -> PagedRows:
        """Rows ``[0, tokens)`` of ``layer``, with room for the step's rows; waits for the swap.

        Raises:
            SwapError: the tier could not be read.
        """
        if layer in self._device:
            return self._device[layer]
        slot, loaded = self._slots[layer]
        started = time.perf_counter()
        loaded.result()
        self.waited_seconds += time.perf_counter() - started
        return slot

    def wrote(self, layer: int, rows: int) -> None:
        """The step has stored ``rows`` new rows of ``layer`` in its pages: persist them, free the slot.

        Raises:
            SwapError: the tier could not be written.
        """
        if layer in self._device:
            return
        slot, _ = self._slots[layer]
        assert self._store is not None
        self._store.write(self.layers[layer], self.tokens, rows, slot)
        del self._slots[layer]
        self._ring.release(slot)
        self._load_next()

    def close_step(self) -> None:
        """End a step, finished or failed: no load is in flight and no slot is held afterwards.

        Loads that nobody took are stopped; they do not come to their end, which may be minutes away on a slow link.
        """
        self._queue.clear()
        self._stop.set()
        wait([loaded for _, loaded in self._slots.values() if not loaded.cancel()])
        for slot, _ in self._slots.values():
            self._ring.release(slot)
        self._slots.clear()
        self._exact = None

    def abort(self) -> None:
        """Stop loads in flight and let later ones fail with ``SwapError``; from any thread, also while a step runs."""
        self.unwanted = True
        self._stop.set()

    @contextmanager
    def aborted(self) -> Iterator[None]:
        """As :meth:`abort`, until the block is left; what was unwanted before stays so."""
        before = self.unwanted
        self.abort()
        try:
            yield
        finally:
            self.unwanted = before

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

    def _load_next(self) -> None:
        if not self._queue:
            return
        layer = self._queue.popleft()
        slot = self._ring.acquire(self.layers[layer], self.tokens + self._room, self)
        exact, tokens, stop = self._exact, self.tokens, self._stop
        self._slots[layer] = (slot, self._ring.submit(lambda: self._timed_fill(layer, slot, tokens, exact, stop)))

    def _timed_fill(self, layer: int, slot: PagedRows, tokens: int, exact: ExactRows | None, stop: threading.Event) -> None:
        started, before = time.perf_counter(), self.moved_bytes
        self._fill(layer, slot, tokens, exact, stop)
        # Only now: who learns the link's speed from these would be misled by a load with bytes or time of one half.
        ended = time.perf_counter()
        self.link_seconds += ended - started
        self.link_bytes += self.moved_bytes - before
        self.loads.append((layer, started, ended))

    def _fill(self, layer: int, slot: PagedRows, tokens: int, exact: ExactRows | None, stop: threading.Event) -> None:
        assert self._store is not None
        if tokens == 0:
            return
        missing = None if exact is None else exact.missing(layer, tokens)
        rest = self._store.read(self.layers[layer], tokens, slot, missing, stop)
        if rest is None or exact is None:
            return
        held = exact.held(layer)
        assert held is not None
        pages, per_head = held
        for head, (index, position) in enumerate(per_head):
            wanted = rest[head]
            at = position.searchsorted(wanted)
            copy_rows(pages, index[at], slot, wanted, head)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if the layers disagree on the length."""
        assert not self._slots, "a step is still open"
        for pages in self._device.values():
            pages.check_integrity()
            assert (pages.lengths == self.tokens).all(), (pages.lengths, self.tokens)
