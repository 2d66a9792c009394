"""Work items cover every row and KV head once, whatever the threads, and no bit depends on who computes them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.attention.test_kernels import new_rows, paged
from tests.sdk.making import descriptor
from tests.watch import same_bits
from vericache_core.attention import numba_kernel
from vericache_core.attention.paged import AttentionJob
from vericache_core.attention.shares import ROW_BLOCK, share_out
from vericache_core.cache.pages import PAGE


def jobs_of(counts: list[int], length: int, window: int | None = None) -> list[AttentionJob]:
    layer, jobs, first = descriptor(heads=6, dtype=torch.bfloat16), [], 0
    for count in counts:
        pages = paged(layer, (length, max(length - 3, 0)), seed=first)
        jobs.append(AttentionJob(first, count, pages, pages.lengths, length, window))
        first += count + 1
    return jobs


@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    length=st.integers(0, 300),
    threads=st.integers(1, 5),
    window=st.sampled_from([None, 1, 7]),
)
def test_every_row_and_head_is_computed_once(counts: list[int], length: int, threads: int, window: int | None) -> None:
    jobs = jobs_of(counts, length, window)
    items, shares = share_out(jobs, 2, threads)
    assert shares.tolist() == sorted(shares.tolist())
    assert (shares[0], shares[-1], len(shares)) == (0, len(items), threads + 1)
    assert all(0 < high - low <= ROW_BLOCK for low, high, _ in items.tolist())
    done = sorted((row, head) for low, high, head in items.tolist() for row in range(low, high))
    assert done == sorted((job.first + row, head) for job in jobs for row in range(job.count) for head in range(2))


def test_three_equal_items_are_cut_for_two_threads() -> None:
    layer = descriptor(heads=9, kv_heads=3)
    pages = paged(layer, (1000, 1000, 1000), seed=0)
    job = AttentionJob(0, 9, pages, pages.lengths, 1000)
    assert len(share_out([job], 3, 1)[0]) == 3
    items, shares = share_out([job], 3, 2)
    assert (len(items), shares.tolist()) == (6, [0, 3, 6])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_bit_depends_on_the_threads(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = descriptor(heads=6, dtype=dtype)
    query, keys, values = new_rows(layer, 24, seed=1)
    found = []
    for threads in (1, 2, 3, 7):
        monkeypatch.setattr(numba_kernel, "get_num_threads", lambda threads=threads: threads)
        pages = [paged(layer, (length, length), seed=length) for length in (PAGE - 5, 20)]
        jobs = [AttentionJob(0, 17, pages[0], pages[0].lengths, PAGE - 5), AttentionJob(18, 5, pages[1], pages[1].lengths, 20)]
        found.append(numba_kernel.attend_numba(query.to(dtype), keys, values, jobs))
    assert all(same_bits(found[0], other) for other in found[1:])
