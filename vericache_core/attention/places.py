"""Where the rows of a step's jobs read and write: what compiled kernels are given instead of Python objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from vericache_core.attention.paged import AttentionJob

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Places:
    """Index arrays of one layer of one step; rows of no job hold zeros.

    Attributes:
        key_pages, value_pages: ``[pages]``, addresses of the pages of all jobs, one job after the other.
        tables: ``[rows]``, where the pages of a row's job begin in them.
        limits: ``[rows, kv_heads]``, first index that a row no longer sees; its own row is stored just before.
        starts: ``[rows]``, first index that a row sees.
        used: ``[n]``, the rows that belong to a job.
    """

    key_pages: Index
    value_pages: Index
    tables: Index
    limits: Index
    starts: Index
    used: Index


def lay_out(jobs: Sequence[AttentionJob], rows: int, kv_heads: int) -> Places:
    """Make room for the new rows of ``jobs`` (at least one) and say where everything lies."""
    bases = np.array([job.base for job in jobs], dtype=np.int64)
    for job, most in zip(jobs, bases.max(1).tolist(), strict=True):
        job.pages.reserve(most + job.count)
    owner, order, used = _rows(tuple((job.first, job.count) for job in jobs))
    tables, starts = np.zeros(rows, dtype=np.int64), np.zeros(rows, dtype=np.int64)
    limits = np.zeros((rows, kv_heads), dtype=np.int64)
    pages = np.array([len(job.pages.key_addresses) for job in jobs], dtype=np.int64)
    tables[used] = (np.cumsum(pages) - pages)[owner]
    limits[used] = bases[owner] + order[:, None] + 1
    if any(job.window is not None for job in jobs):
        starts[used] = np.concatenate([job.starts() for job in jobs])
    return Places(
        np.concatenate([job.pages.key_addresses for job in jobs]),
        np.concatenate([job.pages.value_addresses for job in jobs]),
        tables,
        limits,
        starts,
        used,
    )


@lru_cache(maxsize=64)
def _rows(jobs: tuple[tuple[int, int], ...]) -> tuple[Index, Index, Index]:
    """Of every row of jobs given as (first, count): its job, its place in it, its place in the step; all layers share them."""
    firsts, counts = np.array(jobs, dtype=np.int64).T
    owner = np.repeat(np.arange(len(jobs)), counts)
    order = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    used = firsts[owner] + order
    for index in (owner, order, used):
        index.flags.writeable = False
    return owner, order, used
