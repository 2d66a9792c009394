"""Layers of one request that rest on a tier, and come back for each step through a few slots of the ring."""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vericache_core.cache.move import Index, copy_heads, copy_rows
from vericache_core.cache.pages import PAGE, PagedRows
from vericache_core.cache.ring import SwapRing
from vericache_core.cache.tiers import Pages, TierStore
from vericache_core.kv import LayerDescriptor


class ExactRows(Protocol):
    """Exact rows that another cache already holds on the device (survivors and tail of the draft KV)."""

    def held(self, layer: int) -> tuple[PagedRows, Sequence[tuple[Index, Index]]] | None:
        """``(pages, per KV head (index in pages, logical position))``, or None if nothing exact is held."""


def absent(per_head: Sequence[tuple[Index, Index]], tokens: int) -> list[Index]:
    """Per KV head the positions below ``tokens`` that are none of those held; see :meth:`ExactRows.held`."""
    found = []
    for _, position in per_head:
        chosen = np.ones(tokens, dtype=bool)
        chosen[position[: position.searchsorted(tokens)]] = False
        found.append(np.flatnonzero(chosen))
    return found


@dataclass(slots=True)
class _Load:
    """One layer on its way into a slot: rows ``held`` on the device come from there, ``missing`` ones from the tier."""

    store: TierStore
    layer: LayerDescriptor
    tokens: int
    pages: PagedRows
    held: tuple[PagedRows, Sequence[tuple[Index, Index]]] | None
    missing: Sequence[Index] | None
    stop: threading.Event
    seconds: float = 0.0

    def bring(self) -> None:
        """What the swap thread does: wait for the link, and move the rows unless that is left to the steps' threads."""
        if not self.tokens:
            return
        if self.store.copied:
            self.store.arrive(self.layer, self.tokens, self.missing, self.stop)
            return
        unread = self.store.read(self.layer, self.tokens, self.pages, self.missing, self.stop)
        for head, (at, to) in enumerate(self._rest(unread)):
            copy_rows(self._source, at, self.pages, to, head)

    def take(self) -> None:
        """What the thread of the steps does once the rows have come: what :meth:`bring` left to it."""
        if self.tokens and self.store.copied:
            rest = self._rest(self.store.fetch(self.layer, self.tokens, self.pages, self.missing, self.stop))
            if rest:
                copy_heads(self._source, self.pages, rest)

    @property
    def _source(self) -> PagedRows:
        assert self.held is not None
        return self.held[0]

    def _rest(self, unread: Pages) -> Sequence[tuple[Index, Index]]:
        """Per KV head, which rows of the device go to which positions: those that the tier has not given anyway."""
        if self.held is None or not unread.any():
            return ()
        if unread.all():
            return self.held[1]
        chosen = [unread[to // PAGE] for _, to in self.held[1]]
        return [(at[mine], to[mine]) for mine, (at, to) in zip(chosen, self.held[1], strict=True)]


class StreamedLayers:
    """A step goes ``open`` -> per layer, in order, ``pages`` and ``wrote`` -> ``close_step``.

    Attributes:
        tokens: rows that count.
        link_seconds: time that loads took so far, of ``link_bytes`` bytes, and ``waited_seconds`` that a step stood
            still for them; loads that did not come to their end are in none of them.
        loads: ``(layer, from, to)`` of the newest step's loads, by ``time.perf_counter``.

    Args:
        layers: descriptors of the model.
        offloaded: which of them rest on the tier.
        ring: slots for streaming.
        store: the tier; None if nothing is offloaded.
    """

    def __init__(
        self, layers: Sequence[LayerDescriptor], offloaded: Sequence[int], ring: SwapRing, store: TierStore | None
    ) -> None:
        self.layers, self.tokens = tuple(layers), 0
        self._offloaded, self._ring, self._store = list(offloaded), ring, store
        self._slots: dict[int, tuple[_Load, Future[None]]] = {}
        self._queue: deque[int] = deque()
        self._stop = threading.Event()  # of the loads of one step; ``unwanted`` is of those of every step
        # Apart, and the first is never taken back: one thread may abort for good while another is in a block.
        self._aborted, self._blocks, self._counting = False, 0, threading.Lock()
        self._exact: ExactRows | None = None
        self._room = 0
        self.link_seconds = self.waited_seconds = 0.0
        self.link_bytes = 0
        self.loads: list[tuple[int, float, float]] = []

    @property
    def offloaded(self) -> tuple[int, ...]:
        """Layers whose rows rest on another tier."""
        return tuple(self._offloaded)

    @property
    def unwanted(self) -> bool:
        """Nobody wants loads now, by :meth:`abort` or within :meth:`aborted`: one that fails is no fault of the tier."""
        return self._aborted or self._blocks > 0

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

    def arriving(self, layer: int) -> Future[None] | None:
        """The load of ``layer`` that :meth:`pages` waits for; None for a layer that is on the device."""
        return self._slots[layer][1] if layer in self._slots else None

    def pages(self, layer: int) -> PagedRows:
        """Rows ``[0, tokens)`` of ``layer``, with room for the step's rows; waits for the swap.

        Raises:
            SwapError: the tier could not be read.
        """
        load, come = self._slots[layer]
        started = time.perf_counter()
        come.result()
        came = time.perf_counter()
        load.take()
        ended = time.perf_counter()
        self.waited_seconds += came - started
        longer = ended - came - load.seconds
        if load.store.copied and longer > 0:  # over a link without a limit the copy is the transfer; else it is compute
            self.link_seconds += longer
            self.waited_seconds += longer
            self.loads = [(layer, came, ended) if one[0] == layer else one for one in self.loads]
        return load.pages

    def wrote(self, layer: int, rows: int) -> None:
        """The step has stored ``rows`` new rows of ``layer`` in its pages: persist them, free the slot.

        Raises:
            SwapError: the tier could not be written.
        """
        slot = self._slots[layer][0].pages
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
        wait([come for _, come in self._slots.values() if not come.cancel()])
        for load, _ in self._slots.values():
            self._ring.release(load.pages)
        self._slots.clear()
        self._exact = None

    def abort(self) -> None:
        """Stop loads in flight and let later ones fail with ``SwapError``; from any thread, also while a step runs."""
        self._aborted = True
        self._stop.set()

    @contextmanager
    def aborted(self) -> Iterator[None]:
        """As :meth:`abort`, until the block is left; who aborts for good meanwhile, or before, is obeyed beyond it."""
        with self._counting:
            self._blocks += 1
        self._stop.set()
        try:
            yield
        finally:
            with self._counting:
                self._blocks -= 1

    def _load_next(self) -> None:
        if not self._queue:
            return
        assert self._store is not None
        layer = self._queue.popleft()
        slot = self._ring.acquire(self.layers[layer], self.tokens + self._room, self)
        held = None if self._exact is None or not self.tokens else self._exact.held(layer)
        missing = None if held is None else absent(held[1], self.tokens)
        load = _Load(self._store, self.layers[layer], self.tokens, slot, held, missing, self._stop)
        # Not a field of the load: a fault's traceback holds the load, and the two would keep the ring alive in a circle.
        self._slots[layer] = (load, self._ring.submit(functools.partial(self._timed, load)))

    def _timed(self, load: _Load) -> None:
        started, before = time.perf_counter(), self.moved_bytes
        load.bring()
        # Only now: who learns the link's speed from these would be misled by a load with bytes or time of one half.
        ended = time.perf_counter()
        load.seconds = ended - started
        self.link_seconds += load.seconds
        self.link_bytes += self.moved_bytes - before
        self.loads.append((load.layer.index, started, ended))
