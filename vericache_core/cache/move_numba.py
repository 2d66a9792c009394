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
        for i in range(len(from_index)):
            page, slot = divmod(from_index[i], PAGE)
            new_page, new_slot = divmod(to_index[i], PAGE)
            keys = carray(as_pointer(from_keys[page]), shape, word)
            values = carray(as_pointer(from_values[page]), value_shape, word)
            new_keys = carray(as_pointer(to_keys[new_page]), shape, word)
            new_values = carray(as_pointer(to_values[new_page]), value_shape, word)
            for d in range(head_dim):
                new_keys[head, d, new_slot] = keys[head, d, slot]
            for d in range(value_dim):
                new_values[head, new_slot, d] = values[head, slot, d]

    return copy


_copy16, _copy32 = _build(np.uint16), _build(np.uint32)
