"""The compiled form of :func:`vericache_core.cache.move.copy_rows` (needs Numba)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from vericache_core.attention.numba_bits import as_pointer
from vericache_core.cache.move import Index
from vericache_core.cache.pages import PAGE, PagedRows


def copy_rows_numba(source: PagedRows, source_index: Index, target: PagedRows, target_index: Index, head: int) -> None:
    """Same contract as ``copy_rows``; CPU pages of a 2- or 4-byte dtype."""
    copy = _copy32 if source.layer.dtype.itemsize == 4 else _copy16
    copy(
        *(source.key_addresses, source.value_addresses, source_index),
        *(target.key_addresses, target.value_addresses, target_index),
        *(head, source.layer.head_dim, source.layer.value_dim),
    )


def _build(word: Any) -> Any:
    @njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
    def copy(
        from_keys: Any,
        from_values: Any,
        from_index: Any,
        to_keys: Any,
        to_values: Any,
        to_index: Any,
        head: Any,
        head_dim: Any,
        value_dim: Any,
    ) -> None:
        shape, value_shape = (head + 1, head_dim, PAGE), (head + 1, PAGE, value_dim)
        slots, new_slots = np.empty(PAGE, np.uint64), np.empty(PAGE, np.uint64)  # unsigned: none counts from the end
        lanes = np.empty(PAGE, word)
        first, count = 0, len(from_index)
        while first < count:  # rows of one pair of pages at a time: keys lie by channel, so a channel's rows are neighbours
            page, new_page = from_index[first] // PAGE, to_index[first] // PAGE
            rows, still = 0, True
            lanes[:] = 0
            while first + rows < count and rows < PAGE:
                slot, new_slot = from_index[first + rows] - page * PAGE, to_index[first + rows] - new_page * PAGE
                if not (0 <= slot < PAGE and 0 <= new_slot < PAGE):
                    break
                slots[rows], new_slots[rows] = slot, new_slot
                lanes[slot] = ~word(0)
                still = still and slot == new_slot
                rows += 1
            first += rows
            keys = carray(as_pointer(from_keys[page]), shape, word)[head]
            values = carray(as_pointer(from_values[page]), value_shape, word)[head]
            new_keys = carray(as_pointer(to_keys[new_page]), shape, word)[head]
            new_values = carray(as_pointer(to_values[new_page]), value_shape, word)[head]
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

    return copy


_copy16, _copy32 = _build(np.uint16), _build(np.uint32)
