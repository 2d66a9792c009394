"""The fixed-block attention of the law as one compiled CPU kernel (needs Numba, no C compiler).

Each (row, head) pair runs one fixed sequence of operations over the pages, whoever shares the step and on
whichever thread it lands, so a row's result is row-invariant by construction:

- scores and weighted sums are the register tiles of ``numba_tiles.py``, in which every number is one chain of
  multiply-adds in order, however many rows share the tile;
- keys outside the row's ``[start, limit)`` get weight 0 and their values are never multiplied;
- the sum of weights is folded in halves, always the same ones, and ``exp`` is a polynomial of our own (``numba_softmax.py``);
- what came before a page is multiplied by a power of two only if the row's own largest score has grown.

Where queries and KV are bfloat16 and the CPU multiplies bfloat16 pairs, it does, and softmax weights are rounded
to bfloat16 before they meet the values (their sum is that of the rounded ones); accumulation is float32 either way.
A work item is some rows of one request and one KV head. It lays a page out once, for all its rows (``numba_panels.py``),
and asks for the next page while it computes. The torch reference in ``paged.py`` computes the same attention in
float32; an engine uses one of them throughout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import carray, get_num_threads, njit, prange
from torch import Tensor

from vericache_core.attention.numba_bits import as_pointer
from vericache_core.attention.numba_codes import start_numba
from vericache_core.attention.numba_panels import DOT, FLOAT32, FORMS, LINE, lay_out_panel
from vericache_core.attention.numba_products import HAVE_DOT, LOG2_E, carve, product, take_in
from vericache_core.attention.numba_tiles import COLUMNS, TILE
from vericache_core.attention.paged import AttentionJob
from vericache_core.attention.places import lay_out
from vericache_core.attention.shares import share_out
from vericache_core.cache.pages import PAGE

_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _weigh_alone(form: Any, weights: Any, steps: Any, seen: Any, panel: Any, total: Any, padded: Any, spare: Any) -> None:
    """One row against ``steps`` (from, to) of a panel of values, of which it sees the keys ``seen`` (from, to)."""
    (low, high), (begin, end), line = steps, seen, padded * 4
    for step in range(low, high):
        at = panel + step * line
        if form == DOT and (2 * step < begin or 2 * step + 2 > end):  # of a pair it sees one: the other is read as zeros
            keep = np.uint32(0xFFFF) if 2 * step >= begin else np.uint32(0xFFFF0000)
            words, part = carray(as_pointer(at), padded, np.uint32), carray(as_pointer(spare), padded, np.uint32)
            for d in range(padded):
                part[d] = words[d] & keep
            at = spare
        product(form, 1, (weights + step * 4, 0), (at, line), 1, (total, 0), (total, 0), padded, (at, 0))


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _attend_item(  # noqa: C901, PLR0912, PLR0915 (a kernel is one loop nest)
    query: Any, factor: Any, form: Any, pages: Any, limits: Any, starts: Any, item: Any, state: Any
) -> None:
    """Rows ``item[0]`` to ``item[1]``, of one request, and the query heads of KV head ``item[2]``."""
    (key_pages, value_pages), (low, high, kv_head), (top, total, acc) = pages, item, state
    words, value_dim, group = query.shape[2], acc.shape[2], query.shape[1] // limits.shape[1]
    unit, width = 2 if form == DOT else 1, 4 if form == FLOAT32 else 2
    padded = (value_dim + COLUMNS - 1) // COLUMNS * COLUMNS
    first_head, count, steps = kv_head * group, (high - low) * group, PAGE // unit
    line, query_line, weight_line = padded * 4, words * 4, PAGE * 4 // unit
    panels = (words * PAGE * 4, steps * line, line, PAGE * 4)
    places, scratch = carve((count * query_line, count * line, count * PAGE * 4, count * weight_line, *panels))
    queries, sums, scores, pairs = places[0], places[1], places[2], places[3]
    keys, values, spare, zeros = places[4], places[5], places[6], places[7]
    weights = pairs if form == DOT else scores
    mine = carray(as_pointer(queries), (count, words), np.uint32)
    # A view and no bare address: Numba frees an array after its last use, and these sums are read at the very end.
    offset = sums - np.int64(scratch.ctypes.data)
    sum_rows = scratch[offset : offset + count * line].view(np.float32).reshape((count, padded))
    sum_rows[:] = np.float32(0.0)
    carray(as_pointer(zeros), PAGE, np.float32)[:] = np.float32(0.0)
    tops, totals = np.empty(count, np.float32), np.empty(count, np.float32)
    froms, tos = np.empty(count, np.int64), np.empty(count, np.int64)  # the keys that a row sees
    begins, ends = np.empty(count, np.int64), np.empty(count, np.int64)  # and those within a page
    for r in range(count):
        row, head = low + r // group, first_head + r % group
        tops[r], totals[r], froms[r], tos[r] = top[row, head], total[row, head], starts[row], limits[row, kv_head]
        for d in range(words):
            mine[r, d] = query[row, head, d]
        for d in range(value_dim):
            sum_rows[r, d] = acc[row, head, d]
    last = tos.max()
    final = (last + PAGE - 1) // PAGE - 1
    # Of the next page's cache lines the tiles ask for as many as they have steps, laying out this page for the others.
    key_bytes, value_bytes, tall = words * unit * PAGE * width, value_dim * PAGE * width, (count + TILE - 1) // TILE
    key_lines, value_lines = key_bytes // LINE, value_bytes // LINE
    early_keys = max(key_lines - tall * (PAGE // COLUMNS) * words, 0)
    early_values = max(value_lines - tall * (padded // COLUMNS) * steps, 0)
    for page in range(froms.min() // PAGE, final + 1):
        key_rows, value_rows = key_pages[page] + kv_head * key_bytes, value_pages[page] + kv_head * value_bytes
        next_keys, next_values = key_rows, value_rows
        if page < final:
            next_keys, next_values = key_pages[page + 1] + kv_head * key_bytes, value_pages[page + 1] + kv_head * value_bytes
        else:
            key_lines = value_lines = early_keys = early_values = 0
        begin, end = 0, PAGE  # what all rows see
        for r in range(count):
            begins[r], ends[r] = max(froms[r] - page * PAGE, 0), min(tos[r] - page * PAGE, PAGE)
            begin, end = max(begin, begins[r]), min(end, ends[r])
        lay_out_panel(form, key_rows, words, PAGE, keys, PAGE, (next_keys, early_keys))
        ahead = (next_keys + early_keys * LINE, key_lines - early_keys)
        columns = min((last - page * PAGE + COLUMNS - 1) // COLUMNS * COLUMNS, PAGE)
        target = (scores, PAGE * 4)
        product(form, count, (queries, query_line), (keys, PAGE * 4), words, (zeros, 0), target, columns, ahead)
        for r in range(count):
            if ends[r] > begins[r]:
                own, halves, sums_of = scores + r * PAGE * 4, pairs + r * weight_line, sum_rows[r]
                tops[r], totals[r] = take_in(form, own, halves, factor, begins[r], ends[r], tops[r], totals[r], sums_of)
        filled = (min(last - page * PAGE, PAGE) + unit - 1) // unit
        lay_out_panel(form, value_rows, filled, value_dim, values, padded, (next_values, early_values))
        # What all rows see is done together, the ends row by row: the same order for each row.
        begin, end = (begin + unit - 1) // unit, end // unit
        if end <= begin:
            begin = end = 0
        for r in range(count):
            if ends[r] > begins[r] and begins[r] // unit < begin:
                part, seen = (begins[r] // unit, begin), (begins[r], ends[r])
                _weigh_alone(form, weights + r * weight_line, part, seen, values, sums + r * line, padded, spare)
        if end > begin:
            ahead = (next_values + early_values * LINE, value_lines - early_values)
            own, panel, target = (weights + begin * 4, weight_line), (values + begin * line, line), (sums, line)
            product(form, count, own, panel, end - begin, target, target, padded, ahead)
        for r in range(count):
            if ends[r] > begins[r]:
                part, seen = (max(begins[r] // unit, end), (ends[r] + unit - 1) // unit), (begins[r], ends[r])
                _weigh_alone(form, weights + r * weight_line, part, seen, values, sums + r * line, padded, spare)
    for r in range(count):
        for d in range(value_dim):
            acc[low + r // group, first_head + r % group, d] = sum_rows[r, d] / totals[r]


@njit(parallel=True, error_model="numpy", cache=True)  # type: ignore[untyped-decorator]
def _attend(
    query: Any,
    factor: Any,
    form: Any,
    key_pages: Any,
    value_pages: Any,
    tables: Any,
    limits: Any,
    starts: Any,
    items: Any,
    shares: Any,
    top: Any,
    total: Any,
    acc: Any,
) -> None:
    for share in prange(len(shares) - 1):
        for index in range(shares[share], shares[share + 1]):
            item = (items[index, 0], items[index, 1], items[index, 2])
            pages = (key_pages[tables[item[0]] :], value_pages[tables[item[0]] :])
            _attend_item(query, factor, form, pages, limits, starts, item, (top, total, acc))


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


def attend_numba(query: Tensor, keys: Tensor, values: Tensor, jobs: Sequence[AttentionJob], scaling: float = 1.0) -> Tensor:
    """Same contract as :func:`vericache_core.attention.paged.attend_reference`, CPU tensors only."""
    rows, heads = query.shape[0], query.shape[1]
    if not jobs:
        return query.new_zeros((rows, heads, values.shape[2]), dtype=torch.float32)
    at = lay_out(jobs, rows, keys.shape[1])
    _store(_bits(keys), _bits(values), at.key_pages, at.value_pages, at.tables, at.limits, at.used)
    dot = HAVE_DOT and query.dtype == keys.dtype == torch.bfloat16 and query.shape[2] % 2 == 0
    form, own = (DOT, query) if dot else (FORMS[keys.dtype], query.float())
    top, total, acc = start_numba(query, keys.shape[1], values.shape[2], jobs, scaling, dot=dot)
    places = (at.key_pages, at.value_pages, at.tables, at.limits, at.starts)
    # Words of 32 bits either way (a pair of bfloat16, a float32): one type, so one compiled kernel.
    _attend(
        own.contiguous().view(torch.int32).numpy().view(np.uint32),
        np.float32(scaling * LOG2_E),
        form,
        *places,
        *share_out(jobs, keys.shape[1], get_num_threads()),
        top,
        total,
        acc,
    )
    return torch.from_numpy(acc)


def _bits(rows: Tensor) -> npt.NDArray[Any]:
    """``[rows, kv_heads, width]`` as unsigned bit patterns."""
    view = rows.contiguous().view(_BITS[rows.dtype]).numpy()
    unsigned: npt.NDArray[Any] = view.view(np.uint32 if rows.dtype == torch.float32 else np.uint16)
    return unsigned
