"""The compiled forms of :mod:`vericache_core.cache.move` (need Numba)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import carray, get_num_threads, njit, prange

from vericache_core.attention.numba_bits import as_pointer
from vericache_core.cache.move import Index
from vericache_core.cache.pages import PAGE, PagedRows


def copy_rows_numba(source: PagedRows, source_index: Index, target: PagedRows, target_index: Index, head: int) -> None:
    """Same contract as ``copy_rows``; CPU pages of a 2- or 4-byte dtype. Releases the interpreter's lock."""
    _copy(_rows(source, source_index), _rows(target, target_index), head, _form(source))


def copy_heads_numba(
    source: PagedRows, target: PagedRows, per_head: Sequence[tuple[Index, Index]], parts: int | None = None
) -> None:
    """Same contract as ``copy_heads``; CPU pages of a 2- or 4-byte dtype. ``parts`` for threads to share, one for each."""
    parts = parts or get_num_threads()
    pages = np.arange(parts + 1) * (target.capacity // PAGE) // parts
    # Whole pages of the target to each part: two that write into one page would undo each other.
    cuts = np.stack([to.searchsorted(pages * PAGE) for _, to in per_head])
    cuts += np.cumsum([0, *(len(to) for _, to in per_head[:-1])])[:, None]
    come, go = (np.concatenate([pair[side] for pair in per_head]) for side in (0, 1))
    _copy_heads(_rows(source, come), _rows(target, go), cuts, _form(source))


def _rows(pages: PagedRows, index: Index) -> tuple[Any, Any, Index]:
    return pages.key_addresses, pages.value_addresses, index


def _form(pages: PagedRows) -> tuple[int, int, Any]:
    """Widths of keys and values, and a number of the size of theirs."""
    layer = pages.layer
    return layer.head_dim, layer.value_dim, np.zeros(1, np.uint32 if layer.dtype.itemsize == 4 else np.uint16)


@njit(nogil=True, error_model="numpy", cache=True)  # type: ignore[untyped-decorator]
def _copy(come: Any, go: Any, head: Any, form: Any) -> None:
    """Rows of one head; ``come`` and ``go`` are (addresses of key pages, of value pages, index)."""
    (from_keys, from_values, from_index), (to_keys, to_values, to_index) = come, go
    head_dim, value_dim, none = form
    shape, value_shape = (head + 1, head_dim, PAGE), (head + 1, PAGE, value_dim)
    slots, new_slots = np.empty(PAGE, np.uint64), np.empty(PAGE, np.uint64)  # unsigned: none counts from the end
    lanes = np.empty(PAGE, none.dtype)
    first, count = 0, len(from_index)
    while first < count:  # rows of one pair of pages at a time: keys lie by channel, so a channel's rows are neighbours
        page, new_page = from_index[first] // PAGE, to_index[first] // PAGE
        rows, still = 0, True
        lanes[:] = none[0]
        while first + rows < count and rows < PAGE:
            slot, new_slot = from_index[first + rows] - page * PAGE, to_index[first + rows] - new_page * PAGE
            if not (0 <= slot < PAGE and 0 <= new_slot < PAGE):
                break
            slots[rows], new_slots[rows] = slot, new_slot
            lanes[slot] = ~none[0]
            still = still and slot == new_slot
            rows += 1
        first += rows
        keys = carray(as_pointer(from_keys[page]), shape, none.dtype)[head]
        values = carray(as_pointer(from_values[page]), value_shape, none.dtype)[head]
        new_keys = carray(as_pointer(to_keys[new_page]), shape, none.dtype)[head]
        new_values = carray(as_pointer(to_values[new_page]), value_shape, none.dtype)[head]
        for d in range(head_dim):
            old, new = keys[d], new_keys[d]
            if still:  # vectors under a mask in place of single numbers
                for i in range(PAGE):
                    new[i] = (old[i] & lanes[i]) | (new[i] & ~lanes[i])
            else:
                for i in range(rows):
                    new[new_slots[i]] = old[slots[i]]
        for i in range(rows):
            old, new = values[slots[i]], new_values[new_slots[i]]
            for d in range(value_dim):
                new[d] = old[d]


@njit(parallel=True, error_model="numpy", cache=True)  # type: ignore[untyped-decorator]
def _copy_heads(come: Any, go: Any, cuts: Any, form: Any) -> None:
    """Part ``p`` of head ``h`` are the rows from ``cuts[h, p]`` to ``cuts[h, p + 1]``."""
    (from_keys, from_values, from_index), (to_keys, to_values, to_index) = come, go
    for part in prange(cuts.shape[1] - 1):
        for head in range(cuts.shape[0]):
            low, high = cuts[head, part], cuts[head, part + 1]
            mine, theirs = (from_keys, from_values, from_index[low:high]), (to_keys, to_values, to_index[low:high])
            _copy(mine, theirs, head, form)
