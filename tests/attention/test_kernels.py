"""Fixed-block attention: kernel and reference against a dense oracle, and bits that do not depend on company."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.sdk.making import descriptor
from tests.watch import same_bits
from vericache_core.attention.numba_kernel import attend_numba
from vericache_core.attention.online import AttentionState
from vericache_core.attention.paged import AttentionJob, attend_reference
from vericache_core.cache.pages import PAGE, PagedRows
from vericache_core.kv import LayerDescriptor

Attend = Callable[..., Tensor]
BOTH: list[Any] = [pytest.param(attend_numba, id="numba"), pytest.param(attend_reference, id="reference")]
CPU = torch.device("cpu")


def paged(layer: LayerDescriptor, counts: Sequence[int], seed: int, poison: float | None = None) -> PagedRows:
    """Pages with ``counts[h]`` random rows per KV head; what lies beyond is ``poison``."""
    pages = PagedRows(layer, CPU)
    pages.reserve(max(counts) + 2 * PAGE)
    if poison is not None:
        for number in range(pages.capacity // PAGE):
            for part in pages.page(number):
                part.fill_(poison)
    draw = torch.Generator().manual_seed(seed)
    for head, count in enumerate(counts):
        keys = torch.randn(count, layer.head_dim, generator=draw).to(layer.dtype)
        pages.put_head(head, keys, torch.randn(count, layer.value_dim, generator=draw).to(layer.dtype))
    pages.lengths = np.array(counts, dtype=np.int64)
    return pages


def new_rows(layer: LayerDescriptor, rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    query = torch.randn(rows, layer.heads, layer.head_dim, generator=draw) * layer.scaling
    keys = torch.randn(rows, layer.kv_heads, layer.head_dim, generator=draw).to(layer.dtype)
    return query, keys, torch.randn(rows, layer.kv_heads, layer.value_dim, generator=draw).to(layer.dtype)


def dense(query: Tensor, job: AttentionJob) -> Tensor:
    """``[count, heads, value_dim]`` in float64 from the rows that the job has stored."""
    layer, out = job.pages.layer, []
    for row in range(job.count):
        heads = []
        for head in range(layer.heads):
            kv = head // layer.group
            stop = int(job.base[kv]) + row + 1
            start = 0 if job.window is None else max(0, job.position + row - job.window + 1)
            keys, values = (part[0].double() for part in job.pages.rows(start, stop, kv))
            heads.append((keys @ query[job.first + row, head].double()).softmax(0) @ values)
        out.append(torch.stack(heads))
    return torch.stack(out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group", [1, 2, 4, 7])
@pytest.mark.parametrize("widths", [(16, 16), (24, 40), (64, 64), (128, 128)])
@pytest.mark.parametrize("attend", BOTH)
def test_against_a_dense_oracle(attend: Attend, widths: tuple[int, int], group: int, dtype: torch.dtype) -> None:
    layer = descriptor(heads=2 * group, kv_heads=2, head_dim=widths[0], value_dim=widths[1], dtype=dtype)
    query, keys, values = new_rows(layer, 16, seed=group)
    ragged = paged(layer, (3, 150), seed=1)
    even = paged(layer, (131, 131), seed=2)
    jobs = [
        AttentionJob(0, 3, ragged, ragged.lengths, 150),
        AttentionJob(5, 9, even, even.lengths, 131),
    ]
    found = attend(query, keys, values, jobs)
    for job in jobs:
        mine = slice(job.first, job.first + job.count)
        torch.testing.assert_close(found[mine].double(), dense(query, job), atol=2e-5, rtol=2e-5)
        stored = job.pages.rows(131, 134, 1)[0][0] if job is jobs[1] else job.pages.rows(3, 6, 0)[0][0]
        assert same_bits(stored, keys[job.first : job.first + 3, 1 if job is jobs[1] else 0])
    assert not found[3:5].any()
    assert not found[14:].any()


@pytest.mark.parametrize("window", [1, 5, PAGE, PAGE + 3])
@pytest.mark.parametrize("position", [0, 4, PAGE - 2, 2 * PAGE + 1])
@pytest.mark.parametrize("attend", BOTH)
def test_a_sliding_window_starts_where_it_should(attend: Attend, position: int, window: int) -> None:
    layer = descriptor(window=window)
    query, keys, values = new_rows(layer, 8, seed=3)
    pages = paged(layer, (position, position), seed=4)
    job = AttentionJob(1, 5, pages, pages.lengths, position, window)
    found = attend(query, keys, values, [job])
    torch.testing.assert_close(found[1:6].double(), dense(query, job), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("poison", [float("nan"), 1e4, float("inf")])
@pytest.mark.parametrize("window", [None, 6, 7])
@pytest.mark.parametrize("attend", BOTH)
def test_rows_that_are_not_seen_contribute_exactly_nothing(
    attend: Attend, window: int | None, poison: float, dtype: torch.dtype
) -> None:
    """Rejected rows, another request's old rows, rows before a window: whatever they hold."""
    layer = descriptor(window=window, dtype=dtype)
    query, keys, values = new_rows(layer, 8, seed=5)
    query = query.to(dtype)
    bits = []
    for fill in (0.0, poison):
        pages = paged(layer, (PAGE + 7, PAGE + 7), seed=6, poison=fill)
        if window is not None:
            for part in (pages.page(0)[0], pages.page(0)[1]):
                part.fill_(fill)
            pages.page(1)[0][:, :, 0] = fill
            pages.page(1)[1][:, 0] = fill
        bits.append(attend(query, keys, values, [AttentionJob(0, 4, pages, pages.lengths, PAGE + 7, window)]))
    assert same_bits(bits[0], bits[1])
    assert torch.isfinite(bits[1]).all()


@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("attend", BOTH)
def test_nan_in_a_row_that_is_seen_shows(attend: Attend, where: str) -> None:
    """A NaN must not vanish: the logits have to tell that something is wrong."""
    layer = descriptor()
    query, keys, values = new_rows(layer, 8, seed=5)
    pages = paged(layer, (20, 20), seed=6)
    page_keys, page_values = pages.page(0)
    if where == "key":
        page_keys[0, 3, 11] = float("nan")
    else:
        page_values[0, 11, 3] = float("nan")
    found = attend(query, keys, values, [AttentionJob(0, 2, pages, pages.lengths, 20)])
    assert torch.isnan(found[:2, 0]).any(-1).all()
    assert torch.isfinite(found[:2, 2:]).all()  # the other KV head


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("attend", BOTH)
@pytest.mark.parametrize("widths", [(16, 16), (64, 80)])
def test_a_row_has_the_same_bits_in_any_company(attend: Attend, dtype: torch.dtype, widths: tuple[int, int]) -> None:
    layer = descriptor(heads=6, dtype=dtype, head_dim=widths[0], value_dim=widths[1])
    length = PAGE - 4
    query, keys, values = new_rows(layer, 16, seed=7)
    query = query.to(dtype)  # bfloat16 queries take the dot form where the CPU has it
    one_by_one = []
    pages = paged(layer, (length, length), seed=8)
    for row in range(9):
        q, k, v = torch.zeros_like(query), torch.zeros_like(keys), torch.zeros_like(values)
        q[0], k[0], v[0] = query[row], keys[row], values[row]
        one_by_one.append(attend(q, k, v, [AttentionJob(0, 1, pages, pages.lengths, length + row)])[0])
        pages.grow_lengths(1)
    for first in (0, 1, 7):
        for count in (2, 5, 9):
            again = paged(layer, (length, length), seed=8, poison=float("nan"))
            other = paged(layer, (300, 3), seed=9)
            q, k, v = new_rows(layer, 16, seed=10)
            q = q.to(dtype)
            q[first : first + count], k[first : first + count] = query[:count], keys[:count]
            v[first : first + count] = values[:count]
            jobs = [AttentionJob(first, count, again, again.lengths, length)]
            if first == 7:
                jobs.insert(0, AttentionJob(0, 6, other, other.lengths, 300))
            found = attend(q, k, v, jobs)[first : first + count]
            assert same_bits(found, torch.stack(one_by_one[:count])), (first, count)


@pytest.mark.parametrize("window", [None, 1, 6, PAGE + 3])
@pytest.mark.parametrize("widths", [(16, 16), (24, 40), (64, 64), (80, 96)])
def test_bfloat16_queries_lose_no_more_than_bfloat16_weights(widths: tuple[int, int], window: int | None) -> None:
    layer = descriptor(heads=6, dtype=torch.bfloat16, head_dim=widths[0], value_dim=widths[1], window=window)
    query, keys, values = new_rows(layer, 9, seed=12)
    query = query.bfloat16()
    for length in (1, PAGE - 3, 2 * PAGE + 5):
        pages = paged(layer, (length, length), seed=13)
        job = AttentionJob(1, 7, pages, pages.lengths, length, window)
        found = attend_numba(query, keys, values, [job], 1.5)
        expected = dense(query * 1.5, job)  # 1.5 x bfloat16 is not always bfloat16: the dense one may round
        torch.testing.assert_close(found[1:8].double(), expected, atol=2.0**-7, rtol=2.0**-7)


def test_scaling_is_a_factor_on_the_scores() -> None:
    layer = descriptor(heads=6)
    query, keys, values = new_rows(layer, 8, seed=5)
    found = []
    for attend in (attend_numba, attend_reference):
        for scaling in (0.5, 1.0):
            pages = paged(layer, (30, 30), seed=6)
            job = AttentionJob(0, 3, pages, pages.lengths, 30)
            found.append(attend(query / scaling, keys, values, [job], scaling)[:3])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=2e-5, rtol=2e-5)


@given(
    seed=st.integers(0, 10**6),
    counts=st.lists(st.integers(0, 300), min_size=2, max_size=2),
    rows=st.integers(1, 7),
    group=st.sampled_from([1, 3]),
)
def test_kernel_and_reference_agree(seed: int, counts: list[int], rows: int, group: int) -> None:
    layer = descriptor(heads=2 * group, head_dim=8)
    results = []
    for attend in (attend_numba, attend_reference):
        query, keys, values = new_rows(layer, 8, seed)
        pages = paged(layer, counts, seed)
        results.append(attend(query * 3, keys, values, [AttentionJob(1, rows, pages, pages.lengths, max(counts))]))
    torch.testing.assert_close(results[0], results[1], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("attend", BOTH)
def test_a_compressed_prefix_comes_first(attend: Attend) -> None:
    """Prefix and tail together give what one cache with all rows gives."""
    layer = descriptor()
    draw = torch.Generator().manual_seed(1)
    before = [torch.randn(2, 40, 16, generator=draw) for _ in range(2)]

    class Prefix:
        def attend(self, query: Tensor, state: AttentionState) -> None:
            state.fold(query, *before)

        def parts(self) -> None:
            """No codes."""

    query, keys, values = new_rows(layer, 8, seed=2)
    tail = paged(layer, (5, 5), seed=3)
    found = attend(query, keys, values, [AttentionJob(2, 1, tail, tail.lengths, 45, None, Prefix())])
    whole = PagedRows(layer, CPU)
    whole.append(*before)
    whole.append(*tail.rows(0, 5))
    job = AttentionJob(2, 1, whole, whole.lengths, 45)
    expected = attend(query, keys, values, [job])
    torch.testing.assert_close(found[2], expected[2], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attend", BOTH)
def test_scores_far_apart_neither_overflow_nor_vanish(attend: Attend) -> None:
    layer = descriptor()
    query, keys, values = new_rows(layer, 8, seed=11)
    pages = paged(layer, (PAGE + 3, PAGE + 3), seed=12)
    for scale in (1e3, 1e18):
        job = AttentionJob(0, 2, pages, pages.lengths, PAGE + 3)
        found = attend(query * scale, keys, values, [job])
        assert torch.isfinite(found).all()
        torch.testing.assert_close(found[:2].double(), dense(query * scale, job), atol=1e-4, rtol=1e-4)
