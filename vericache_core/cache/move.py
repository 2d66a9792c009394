"""Copy single rows between paged layouts: the torch reference and, on CPU, a compiled loop.

The compiled loop releases the interpreter lock, so the swap thread fills the next layer while the model
computes this one.
"""

from __future__ import annotations

import importlib.util
from typing import Any

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


def copy_rows_reference(source: PagedRows, source_index: Index, target: PagedRows, target_index: Index, head: int) -> None:
    """The same by advanced indexing, one page of the target at a time; works across devices."""
    for page in np.unique(target_index // PAGE):
        chosen = target_index // PAGE == page
        slots = torch.from_numpy(target_index[chosen] % PAGE).to(target.device)
        rows: list[tuple[Any, Any]] = []
        for index in source_index[chosen]:
            keys, values = source.page(int(index) // PAGE)
            rows.append((keys[head, :, int(index) % PAGE], values[head, int(index) % PAGE]))
        keys, values = target.page(int(page))
        keys[head].index_copy_(1, slots, torch.stack([row[0] for row in rows], 1).to(target.device))
        values[head].index_copy_(0, slots, torch.stack([row[1] for row in rows]).to(target.device))
