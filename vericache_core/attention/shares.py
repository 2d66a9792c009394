"""Who computes what: the work items of one layer of one step, shared out among threads.

How rows are cut into items and which thread computes them changes no bit, so both may follow the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from vericache_core.attention.paged import AttentionJob

ROW_BLOCK = 16
"""Most rows of one item."""
FIXED_ROWS = 2
"""What an item costs beside its rows, in rows: reading its keys and values and laying them out."""

Index = npt.NDArray[np.int64]


def share_out(jobs: Sequence[AttentionJob], kv_heads: int, threads: int) -> tuple[Index, Index]:
    """``items [n, 3]``: first row, row after the last, KV head; and ``shares [threads + 1]``.

    Thread ``t`` computes the items from ``shares[t]`` to ``shares[t + 1]``; a share may be empty.
    """
    seen = [
        job.base.tolist() if job.window is None else (job.base - max(0, job.position - job.window)).tolist() for job in jobs
    ]
    return _plan(tuple((job.first, job.count, *keys) for job, keys in zip(jobs, seen, strict=True)), kv_heads, threads)


def share_out_spans(spans: tuple[tuple[int, int, int], ...], kv_heads: int, threads: int) -> tuple[Index, Index]:
    """The same for ``(first row, rows, keys)`` of each job, all of which every row sees."""
    return _plan(tuple((first, count, *[keys] * kv_heads) for first, count, keys in spans), kv_heads, threads)


@lru_cache(maxsize=64)
def _plan(jobs: tuple[tuple[int, ...], ...], kv_heads: int, threads: int) -> tuple[Index, Index]:
    """The better of two plans: rows in as few blocks as may be, or in twice as many; the layers of a step share it."""
    plans = []
    for parts in (1, 2) if threads > 1 else (1,):
        shares: list[list[tuple[int, int, int]]] = [[] for _ in range(threads)]
        loads = [0] * threads
        for cost, item in sorted(_items(jobs, kv_heads, parts), reverse=True):
            thread = loads.index(min(loads))
            loads[thread] += cost
            shares[thread].append(item)
        plans.append((max(loads), parts, shares))
    chosen = min(plans)[2]
    items = [item for share in chosen for item in share]
    return np.array(items, dtype=np.int64), np.cumsum([0, *map(len, chosen)])


def _items(jobs: tuple[tuple[int, ...], ...], kv_heads: int, parts: int) -> list[tuple[int, tuple[int, int, int]]]:
    """(cost, item) of every item; each job in even blocks."""
    items: list[tuple[int, tuple[int, int, int]]] = []
    for first, count, *keys in jobs:
        each = -(-count // (-(-count // ROW_BLOCK) * parts))
        for low in range(first, first + count, each):
            high = min(low + each, first + count)
            items.extend(((keys[head] + count) * (high - low + FIXED_ROWS), (low, high, head)) for head in range(kv_heads))
    return items
