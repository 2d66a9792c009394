"""The fixed-block attention of the law as one compiled CPU kernel (needs Numba, no C compiler).

Each (row, head) pair runs one fixed sequence of float32 operations over the pages, whoever shares the
step and on whichever thread it lands, so a row's result is row-invariant by construction:

- a score is a sum over channels in channel order, computed for the ``PAGE`` keys of a page side by side;
- keys outside the row's ``[start, limit)`` get weight 0 and their values are never read;
- the sum of weights runs over ``LANES`` fixed partial sums, then lane by lane;
- ``exp`` is a polynomial written out here (Cephes ``expf``), not a library call that may differ by lane.

Threads take (row block, KV head) items; a block converts each page to float32 once for its rows.
The torch reference in ``paged.py`` computes the same attention; the two differ in the last bits only, and
an engine uses one of them throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import carray, njit, prange
from torch import Tensor

from vericache_core.attention.numba_bits import as_pointer, float_from_bits, float_from_half
from vericache_core.attention.online import AttentionState
from vericache_core.attention.paged import AttentionJob
from vericache_core.cache.pages import PAGE

LANES = 16
ROW_BLOCK = 8
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@njit(inline="always", error_model="numpy")  # type: ignore[untyped-decorator]
def _exp(x: Any) -> Any:
    x = max(x, np.float32(-87.0))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    y = np.float32(1.9875691500e-4)
    y = y * r + np.float32(1.3981999507e-3)
    y = y * r + np.float32(8.3334519073e-3)
    y = y * r + np.float32(4.1665795894e-2)
    y = y * r + np.float32(1.6666665459e-1)
    y = y * r + np.float32(5.0000001201e-1)
    y = y * r * r + r + np.float32(1.0)
    return y * float_from_bits(np.uint32((np.int32(n) + np.int32(127)) << np.int32(23)))


@njit(inline="always", error_model="numpy")  # type: ignore[untyped-decorator]
def _load(address: Any, kind: Any, count: Any, target: Any) -> Any:
    """Convert ``count`` consecutive numbers at ``address`` to float32."""
    if kind == 0:
        words = carray(as_pointer(address), (count,), np.uint32)
        for i in range(count):
            target[i] = float_from_bits(words[i])
    elif kind == 1:
        halves = carray(as_pointer(address), (count,), np.uint16)
        for i in range(count):
            target[i] = float_from_bits(np.uint32(halves[i]) << np.uint32(16))
    else:
        halves = carray(as_pointer(address), (count,), np.uint16)
        for i in range(count):
            target[i] = float_from_half(halves[i])


@njit(inline="always", fastmath={"contract"}, error_model="numpy")  # type: ignore[untyped-decorator]
def _add_four(target: Any, factors: Any, rows: Any, width: Any) -> Any:
    """``target += factors @ rows`` for four rows of ``width``, added one after the other.

    Four at a time keep ``target`` in registers between them: the same bits as four calls of ``_add_one``,
    more than twice as fast.
    """
    a, b, c, e = factors[0], factors[1], factors[2], factors[3]
    first, second, third, fourth = rows[:width], rows[width : 2 * width], rows[2 * width : 3 * width], rows[3 * width :]
    for i in range(width):
        target[i] = target[i] + a * first[i] + b * second[i] + c * third[i] + e * fourth[i]


@njit(inline="always", fastmath={"contract"}, error_model="numpy")  # type: ignore[untyped-decorator]
def _add_one(target: Any, factor: Any, row: Any, width: Any) -> Any:
    for i in range(width):
        target[i] += factor * row[i]


@njit(parallel=True, fastmath={"contract"}, error_model="numpy", cache=True)  # type: ignore[untyped-decorator]
def _attend(  # noqa: C901, PLR0912 (a kernel is one loop nest)
    query: Any,
    kind: Any,
    key_pages: Any,
    value_pages: Any,
    tables: Any,
    limits: Any,
    starts: Any,
    items: Any,
    top: Any,
    total: Any,
    acc: Any,
) -> None:
    heads, head_dim, value_dim = query.shape[1], query.shape[2], acc.shape[2]
    kv_heads = limits.shape[1]
    group = heads // kv_heads
    width = 4 if kind == 0 else 2
    for item in prange(items.shape[0] * kv_heads):
        block, kv_head = item // kv_heads, item % kv_heads
        low, high = items[block, 0], items[block, 1]
        table = tables[low]
        keys = np.empty(head_dim * PAGE, np.float32)
        values = np.empty(PAGE * value_dim, np.float32)
        weights = np.empty(PAGE, np.float32)
        lanes = np.empty(LANES, np.float32)
        first, last = starts[low], limits[low, kv_head]
        for row in range(low, high):
            first = min(first, starts[row])
            last = max(last, limits[row, kv_head])
        for page in range(first // PAGE, (last + PAGE - 1) // PAGE):
            _load(key_pages[table + page] + kv_head * head_dim * PAGE * width, kind, head_dim * PAGE, keys)
            _load(value_pages[table + page] + kv_head * value_dim * PAGE * width, kind, PAGE * value_dim, values)
            for row in range(low, high):
                begin = max(starts[row] - page * PAGE, 0)
                end = min(limits[row, kv_head] - page * PAGE, PAGE)
                if end <= begin:
                    continue
                for head in range(kv_head * group, (kv_head + 1) * group):
                    for j in range(PAGE):
                        weights[j] = np.float32(0.0)
                    for d in range(0, head_dim - 3, 4):
                        _add_four(weights, query[row, head, d : d + 4], keys[d * PAGE : (d + 4) * PAGE], PAGE)
                    for d in range(head_dim - head_dim % 4, head_dim):
                        _add_one(weights, query[row, head, d], keys[d * PAGE : (d + 1) * PAGE], PAGE)
                    peak = top[row, head]
                    for j in range(begin, end):
                        peak = max(peak, weights[j])
                    for j in range(PAGE):
                        weights[j] = _exp(weights[j] - peak)
                    for j in range(begin):
                        weights[j] = np.float32(0.0)
                    for j in range(end, PAGE):
                        weights[j] = np.float32(0.0)
                    for i in range(LANES):
                        lanes[i] = np.float32(0.0)
                    for j in range(0, PAGE, LANES):
                        for i in range(LANES):
                            lanes[i] += weights[j + i]
                    mass = np.float32(0.0)
                    for i in range(LANES):
                        mass += lanes[i]
                    decay = _exp(top[row, head] - peak)
                    top[row, head] = peak
                    total[row, head] = total[row, head] * decay + mass
                    for d in range(value_dim):
                        acc[row, head, d] *= decay
                    whole = begin + (end - begin) // 4 * 4
                    for j in range(begin, whole, 4):
                        _add_four(acc[row, head], weights[j : j + 4], values[j * value_dim : (j + 4) * value_dim], value_dim)
                    for j in range(whole, end):
                        _add_one(acc[row, head], weights[j], values[j * value_dim : (j + 1) * value_dim], value_dim)


@njit(error_model="numpy", cache=True)  # type: ignore[untyped-decorator]
def _store(new_keys: Any, new_values: Any, key_pages: Any, value_pages: Any, tables: Any, limits: Any, rows: Any) -> None:
    """Scatter the bit patterns of new rows; row ``r`` of KV head ``h`` goes to index ``limits[r, h] - 1``."""
    kv_heads, head_dim, value_dim = new_keys.shape[1], new_keys.shape[2], new_values.shape[2]
    for row in rows:
        for head in range(kv_heads):
            page, slot = divmod(limits[row, head] - 1, PAGE)
            keys = carray(as_pointer(key_pages[tables[row] + page]), (kv_heads, head_dim, PAGE), new_keys.dtype)
            values = carray(as_pointer(value_pages[tables[row] + page]), (kv_heads, PAGE, value_dim), new_values.dtype)
            for d in range(head_dim):
                keys[head, d, slot] = new_keys[row, head, d]
            for d in range(value_dim):
                values[head, slot, d] = new_values[row, head, d]


def attend_numba(query: Tensor, keys: Tensor, values: Tensor, jobs: Sequence[AttentionJob]) -> Tensor:
    """Same contract as :func:`vericache_core.attention.paged.attend_reference`, CPU tensors only."""
    rows, heads = query.shape[0], query.shape[1]
    kv_heads = keys.shape[1]
    tables = np.zeros(rows, dtype=np.int64)
    limits = np.zeros((rows, kv_heads), dtype=np.int64)
    starts = np.zeros(rows, dtype=np.int64)
    items: list[tuple[int, int]] = []
    used: list[int] = []
    offset = 0
    for job in jobs:
        job.pages.reserve(int(job.base.max()) + job.count)
        stop = job.first + job.count
        tables[job.first : stop], limits[job.first : stop], starts[job.first : stop] = offset, job.limits(), job.starts()
        offset += len(job.pages.key_addresses)
        used.extend(range(job.first, stop))
        items.extend((low, min(low + ROW_BLOCK, stop)) for low in range(job.first, stop, ROW_BLOCK))
    output = torch.zeros((rows, heads, values.shape[2]), dtype=torch.float32)
    if not jobs:
        return output
    key_pages = np.concatenate([job.pages.key_addresses for job in jobs])
    value_pages = np.concatenate([job.pages.value_addresses for job in jobs])
    _store(_bits(keys), _bits(values), key_pages, value_pages, tables, limits, np.array(used, dtype=np.int64))

    top = torch.full((rows, heads), float("-inf"))
    total = torch.zeros((rows, heads))
    for job in jobs:
        if job.prefix is not None:
            _attend_prefix(query, job, top, total, output)
    arrays = (top.numpy(), total.numpy(), output.numpy())
    _attend(
        query.contiguous().numpy(), KINDS[keys.dtype], key_pages, value_pages, tables, limits, starts, np.array(items), *arrays
    )
    mine = torch.tensor(used)
    output[mine] /= total[mine].unsqueeze(-1)
    return output


def _attend_prefix(query: Tensor, job: AttentionJob, top: Tensor, total: Tensor, acc: Tensor) -> None:
    """Let the compressed prefix of ``job`` fill the state its rows start from."""
    assert job.prefix is not None
    mine = slice(job.first, job.first + job.count)
    state = AttentionState.fresh(query.shape[1], job.count, acc.shape[2])
    job.prefix.attend(query[mine].transpose(0, 1).contiguous(), state)
    top[mine], total[mine], acc[mine] = state.top.T, state.total.T, state.acc.transpose(0, 1)


def _bits(rows: Tensor) -> npt.NDArray[Any]:
    """``[rows, kv_heads, width]`` as unsigned bit patterns."""
    view = rows.contiguous().view(_BITS[rows.dtype]).numpy()
    unsigned: npt.NDArray[Any] = view.view(np.uint32 if rows.dtype == torch.float32 else np.uint16)
    return unsigned
