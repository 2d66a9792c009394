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
    """Index arrays of one layer of one step, to be read only; rows of no job hold zeros.

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
    """Make room for the new rows of ``jobs`` (at least one) and say where everything lies.

    Most layers of a step differ in nothing but the addresses of their pages, so the rest is kept from the last one.
    """
    same = tuple(
        (job.first, job.count, job.base.tobytes(), -1 if job.window is None else job.position, job.window) for job in jobs
    )
    rooms, limits, starts = _bounds(same, rows, kv_heads)
    for job, room in zip(jobs, rooms, strict=True):
        job.pages.reserve(room)
    places = tuple([(job.first, job.count) for job in jobs])
    pages = tuple([len(job.pages.key_addresses) for job in jobs])
    return Places(
        np.concatenate([job.pages.key_addresses for job in jobs]),
        np.concatenate([job.pages.value_addresses for job in jobs]),
        _tables(places, pages, rows),
        limits,
        starts,
        _rows(places)[2],
    )


@lru_cache(maxsize=64)
def _bounds(
    jobs: tuple[tuple[int, int, bytes, int, int | None], ...], rows: int, kv_heads: int
) -> tuple[list[int], Index, Index]:
    """Of jobs given as (first, count, base, position, window): rows that each needs room for, limits and starts of all rows."""
    owner, order, used = _rows(tuple((first, count) for first, count, *_ in jobs))
    bases = np.array([np.frombuffer(base, dtype=np.int64) for _, _, base, _, _ in jobs])
    starts, limits = np.zeros(rows, dtype=np.int64), np.zeros((rows, kv_heads), dtype=np.int64)
    limits[used] = bases[owner] + order[:, None] + 1
    for first, count, _, position, window in jobs:
        if window is not None:
            starts[first : first + count] = np.maximum(0, position + np.arange(count) - window + 1)
    return [most + count for most, (_, count, *_) in zip(bases.max(1).tolist(), jobs, strict=True)], limits, starts


@lru_cache(maxsize=64)
def _tables(jobs: tuple[tuple[int, int], ...], pages: tuple[int, ...], rows: int) -> Index:
    """Where the pages of each row's job begin, of jobs given as (first, count) that have so many ``pages``."""
    owner, _, used = _rows(jobs)
    tables = np.zeros(rows, dtype=np.int64)
    tables[used] = (np.cumsum(pages) - pages)[owner]
    return tables


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
