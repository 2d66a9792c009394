"""Copy single rows between paged layouts: the torch reference and, on CPU, compiled loops.

That over the rows of one head releases the interpreter's lock, for threads beside the steps.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from vericache_core.cache.pages import PAGE, PagedRows

Index = npt.NDArray[np.int64]
HAVE_NUMBA = importlib.util.find_spec("numba") is not None


def copy_rows(source: PagedRows, source_index: Index, target: PagedRows, target_index: Index, head: int) -> None:
    """Copy rows of KV head ``head``: ``target[target_index[i]] = source[source_index[i]]``, bit for bit."""
    if not len(source_index):
        return
    if HAVE_NUMBA and source.device.type == "cpu" and target.device.type == "cpu":
        from vericache_core.cache.move_numba import copy_rows_numba

        copy_rows_numba(source, source_index, target, target_index, head)
    else:
        copy_rows_reference(source, source_index, target, target_index, head)


def copy_heads(source: PagedRows, target: PagedRows, per_head: Sequence[tuple[Index, Index]]) -> None:
    """Copy rows of every KV head: ``target[to[i]] = source[at[i]]`` for the ``(at, to)`` of each, ``to`` ascending.

    On the CPU all threads of the attention kernel take part, so this is for the thread that runs steps.
    """
    if HAVE_NUMBA and source.device.type == "cpu" and target.device.type == "cpu":
        from vericache_core.cache.move_numba import copy_heads_numba

        copy_heads_numba(source, target, per_head)
    else:
        for head, (at, to) in enumerate(per_head):
            copy_rows(source, at, target, to, head)


def copy_rows_reference(source: PagedRows, source_index: Index, target: PagedRows, target_index: Index, head: int) -> None:
    """The same by advanced indexing, one pair of pages at a time; works across devices.

    Between the host and a CUDA device the copy has ended when this returns: what is gathered on the host is not
    pinned.
    """
    pairs = np.stack([source_index // PAGE, target_index // PAGE])
    for source_page, target_page in np.unique(pairs, axis=1).T:
        chosen = (pairs[0] == source_page) & (pairs[1] == target_page)
        taken = torch.from_numpy(source_index[chosen] % PAGE).to(source.device)
        slots = torch.from_numpy(target_index[chosen] % PAGE).to(target.device)
        from_keys, from_values = source.page(int(source_page))
        keys, values = target.page(int(target_page))
        keys[head].index_copy_(1, slots, from_keys[head].index_select(1, taken).to(target.device))
        values[head].index_copy_(0, slots, from_values[head].index_select(0, taken).to(target.device))
