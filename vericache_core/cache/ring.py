"""The swap ring: a few layers' worth of device pages through which offloaded full KV streams.

One background thread fills slots in layer order while the model computes earlier layers. On CUDA the
copies go to a side stream and the consumer waits for their event.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from vericache_core.cache.link import Link
from vericache_core.cache.pages import PAGE, Extent, PagedRows, pages_for
from vericache_core.errors import SwapError
from vericache_core.kv import LayerDescriptor


@dataclass(frozen=True, slots=True)
class RingPeak:
    """The moment at which slots took most.

    Attributes:
        nbytes: device bytes of all slots then, in use or kept for reuse.
        layer_bytes: bytes of one layer, the largest with a slot, of each full KV that held slots then, all together.
    """

    nbytes: int = 0
    layer_bytes: int = 0

    @property
    def layers(self) -> float | None:
        """Layers' worth of slots for each full KV that held some; None before the first."""
        return self.nbytes / self.layer_bytes if self.layer_bytes else None


@dataclass(frozen=True, slots=True)
class _Lease:
    """A slot in use; ``wanted`` are the bytes of the rows that it was asked for."""

    extent: Extent
    holder: object
    wanted: int


class SwapRing:
    """Slots shared by the requests of an engine.

    Attributes:
        peak: the most that slots took, since whoever watches it set it to ``RingPeak()``.

    Args:
        layers: slots a request may hold at a time, 2 to 4.
        device: where slots live.
        link: what fills them; its limit holds for all requests together.
    """

    def __init__(self, layers: int, device: torch.device, link: Link | None = None) -> None:
        self.layers, self.device, self.link = layers, device, link or Link()
        self._free: list[Extent] = []
        self._busy: dict[int, _Lease] = {}
        self.peak = RingPeak()
        self._worker: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()  # a verify in the background takes slots, too
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @property
    def nbytes(self) -> int:
        """Device bytes of all slots, in use or kept for reuse."""
        with self._lock:
            return self._held()

    def _held(self) -> int:
        return sum(extent.nbytes for extent in [*self._free, *(lease.extent for lease in self._busy.values())])

    def acquire(self, layer: LayerDescriptor, rows: int, holder: object) -> PagedRows:
        """An empty slot of ``layer`` with room for ``rows`` rows, for the full KV ``holder``.

        Raises:
            SwapError: there is no device memory for it.
        """
        slot = PagedRows(layer, self.device)
        with self._lock:
            extent = self._take(layer, rows)
            slot.adopt(extent)
            self._busy[id(slot)] = _Lease(extent, holder, rows * layer.token_bytes)
            self._note_peak()
        return slot

    def _note_peak(self) -> None:
        largest: dict[int, int] = {}
        for lease in self._busy.values():
            largest[id(lease.holder)] = max(lease.wanted, largest.get(id(lease.holder), 0))
        found = RingPeak(self._held(), sum(largest.values()))
        # Of moments with as many bytes the one at which most of them were in use: a step takes its slots one by one.
        if (found.nbytes, found.layer_bytes) > (self.peak.nbytes, self.peak.layer_bytes):
            self.peak = found

    def _take(self, layer: LayerDescriptor, rows: int) -> Extent:
        pages = pages_for(rows)
        fitting = [extent for extent in self._free if extent.pages >= pages and _fits(extent, layer)]
        if fitting:
            extent = min(fitting, key=lambda extent: extent.pages)
            self._free = [other for other in self._free if other is not extent]
        else:
            # Slots that have become too small would otherwise pile up as requests grow.
            self._free = [other for other in self._free if not _fits(other, layer)]
            try:
                extent = Extent.allocate(layer, ring_rows(rows) // PAGE, self.device)
            except (MemoryError, RuntimeError) as error:
                raise SwapError(f"no device memory for {pages} pages of swapped KV", cause=str(error)) from error
        return extent

    def release(self, slot: PagedRows) -> None:
        """Take the slot back; its pages may be handed out again at once."""
        with self._lock:
            self._free.append(self._busy.pop(id(slot)).extent)

    def submit(self, fill: Callable[[], None]) -> Future[None]:
        """Run ``fill`` on the swap thread, in order of submission."""
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="vericache-swap")
        if self._stream is None:
            return self._worker.submit(fill)
        ready: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(self.device))

        def on_stream() -> None:
            # The slot may still be read by compute that was queued before this load was asked for.
            with torch.cuda.stream(self._stream):
                torch.cuda.current_stream(self.device).wait_event(ready)
                try:
                    fill()
                finally:  # a fill that was stopped has copies in flight, and its slot goes to others
                    torch.cuda.current_stream(self.device).synchronize()

        return self._worker.submit(on_stream)

    def trim(self) -> None:
        """Drop slots that nobody uses."""
        with self._lock:
            self._free.clear()

    def close(self) -> None:
        """Stop the thread; a load in flight ends first, so whoever asked for it is to stop it before."""
        if self._worker is not None:
            self._worker.shutdown(wait=True, cancel_futures=True)
            self._worker = None
        self.trim()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if a slot is both free and in use."""
        with self._lock:
            held = [extent.keys.data_ptr() for extent in self._free]
            busy = [lease.extent.keys.data_ptr() for lease in self._busy.values()]
        free = set(held)
        assert len(free) == len(held), "a slot is free twice"
        assert len(set(busy)) == len(busy), "a slot is in use twice"
        assert not free & set(busy), "a slot is free and in use"


def ring_rows(rows: int) -> int:
    """Rows of a slot that is made for ``rows`` rows: some more, so that a growing request keeps it."""
    pages = pages_for(rows)
    return (pages + pages // 8 + 1) * PAGE


def _fits(extent: Extent, layer: LayerDescriptor) -> bool:
    return (
        extent.keys.dtype == layer.dtype
        and tuple(extent.keys.shape[1:]) == (layer.kv_heads, layer.head_dim, PAGE)
        and extent.values.shape[3] == layer.value_dim
    )
