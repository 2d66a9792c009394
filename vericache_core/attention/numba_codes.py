"""Attention over the codes of compressed prefixes on the CPU: one compiled call for all requests of a step.

A work item is some rows of one request and one KV head, as in ``numba_kernel.py``. It makes a page of codes into a panel,
once for all its rows (``numba_decode.py``), and the same register tiles and softmax go over it: codes and scales are the
only KV bytes read, and each (row, head) runs one fixed sequence of operations, in whatever company. Every row sees the
whole prefix. What comes out is the softmax state that the pages of the request are folded into afterwards.

The reference is ``CodedLayer.attend``: decode a block, fold it. Beside it the dot form rounds queries (rotated ones too),
decoded numbers and softmax weights to bfloat16; drafts only propose.
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
from vericache_core.attention.numba_decode import write_keys, write_values
from vericache_core.attention.numba_panels import DOT, FLOAT32
from vericache_core.attention.numba_products import LOG2_E, carve, product, take_in
from vericache_core.attention.numba_tiles import COLUMNS, LANES
from vericache_core.attention.online import AttentionState
from vericache_core.attention.paged import AttentionJob, start_state
from vericache_core.attention.shares import share_out_spans
from vericache_core.attention.sources import CodedPart, SourceTable, Turn
from vericache_core.cache.pages import PAGE

Numbers = npt.NDArray[np.float32]


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _fold_item(
    query: Any, factor: Any, form: Any, keys: Any, values: Any, part: Any, item: Any, kv_heads: Any, state: Any
) -> None:
    """Rows ``item[0]`` to ``item[1]``, of one request, and the query heads of KV head ``item[2]``.

    ``part`` is (tokens, first and last source of the keys, of the values).
    """
    (top, total, acc), (low, high, kv_head) = state, item
    tokens, key_range, value_range = part[0], (part[1], part[2]), (part[3], part[4])
    words, value_dim, group = query.shape[2], acc.shape[2], query.shape[1] // kv_heads
    unit = 2 if form == DOT else 1
    head_dim, padded = words * unit, (value_dim + COLUMNS - 1) // COLUMNS * COLUMNS
    first_head, count = kv_head * group, (high - low) * group
    line, query_line, weight_line = padded * 4, words * 4, PAGE * 4 // unit
    rows = (count * query_line, count * line, count * PAGE * 4, count * weight_line)
    panel_bytes = max(words * PAGE * 4, PAGE // unit * line)  # one place for both: the first level of cache holds it
    numbers = max(head_dim, PAGE * max(1, value_dim // LANES)) * 4
    places, scratch = carve((*rows, panel_bytes, PAGE * 4, numbers, numbers, 4 * LANES, PAGE * 4))
    queries, sums, scores, pairs = places[0], places[1], places[2], places[3]
    panel, zeros, spare = places[4], places[5], places[6:]
    weights = pairs if form == DOT else scores
    mine = carray(as_pointer(queries), (count, words), np.uint32)
    # A view and no bare address: Numba frees an array after its last use, and these sums are read at the very end.
    offset = sums - np.int64(scratch.ctypes.data)
    sum_rows = scratch[offset : offset + count * line].view(np.float32).reshape((count, padded))
    sum_rows[:] = np.float32(0.0)
    carray(as_pointer(zeros), PAGE, np.float32)[:] = np.float32(0.0)
    factors = carray(as_pointer(spare[3]), PAGE, np.float32)
    ramp = carray(as_pointer(spare[2]), LANES, np.float32)
    for lane in range(LANES):
        ramp[lane] = lane
    tops, totals = np.empty(count, np.float32), np.empty(count, np.float32)
    for r in range(count):
        row, head = low + r // group, first_head + r % group
        tops[r], totals[r] = top[row, head], total[row, head]
        for d in range(words):
            mine[r, d] = query[row, head, d]
        for d in range(value_dim):
            sum_rows[r, d] = acc[row, head, d]
    for first in range(0, tokens, PAGE):
        last = min(first + PAGE, tokens)
        filled = last - first
        scaled = write_keys(form, keys, key_range, kv_head, head_dim, first, last, panel, spare)
        columns = (filled + COLUMNS - 1) // COLUMNS * COLUMNS
        target, still = (scores, PAGE * 4), (panel, 0)
        product(form, count, (queries, query_line), (panel, PAGE * 4), words, (zeros, 0), target, columns, still)
        if scaled:
            for r in range(count):
                own = carray(as_pointer(scores + r * PAGE * 4), filled, np.float32)
                for i in range(filled):
                    own[i] *= factors[i]
        for r in range(count):
            own_scores, halves = scores + r * PAGE * 4, pairs + r * weight_line
            tops[r], totals[r] = take_in(form, own_scores, halves, factor, 0, filled, tops[r], totals[r], sum_rows[r])
        write_values(form, values, value_range, kv_head, value_dim, first, last, panel, padded, spare)
        target, steps = (sums, line), (filled + unit - 1) // unit
        product(form, count, (weights, weight_line), (panel, line), steps, target, target, padded, still)
    for r in range(count):
        row, head = low + r // group, first_head + r % group
        top[row, head], total[row, head] = tops[r], totals[r]
        for d in range(value_dim):
            acc[row, head, d] = sum_rows[r, d]


@njit(parallel=True, error_model="numpy", cache=True)  # type: ignore[untyped-decorator]
def _fold(
    query: Any,
    factor: Any,
    form: Any,
    keys: Any,
    values: Any,
    parts: Any,
    owner: Any,
    kv_heads: Any,
    items: Any,
    shares: Any,
    top: Any,
    total: Any,
    acc: Any,
) -> None:
    for share in prange(len(shares) - 1):
        for index in range(shares[share], shares[share + 1]):
            item = (items[index, 0], items[index, 1], items[index, 2])
            own = parts[owner[item[0]]]
            part = (own[0], own[1], own[2], own[3], own[4])
            _fold_item(query, factor, form, keys, values, part, item, kv_heads, (top, total, acc))


def start_numba(
    query: Tensor, kv_heads: int, value_dim: int, jobs: Sequence[AttentionJob], scaling: float, *, dot: bool
) -> tuple[Numbers, Numbers, Numbers]:
    """:func:`vericache_core.attention.paged.start_state` with the codes of all prefixes in one call.

    ``query`` is ``[rows, heads, head_dim]``; ``dot`` says that it is bfloat16 and multiplied in pairs. Returns ``top`` (of
    scores in powers of two), ``total`` and ``acc`` of the state.
    """
    if all(job.prefix is None for job in jobs):  # the usual layer; torch takes ten times as long to make arrays so small
        shape = (query.shape[0], query.shape[1])
        top = np.full(shape, -np.inf, dtype=np.float32)
        return top, np.zeros(shape, dtype=np.float32), np.zeros((*shape, value_dim), dtype=np.float32)
    coded, others = [], []
    for job in jobs:
        parts = None if job.prefix is None else job.prefix.parts()
        if parts is not None and all(part.fits(kv_heads, query.shape[2], value_dim) for part in parts):
            coded.append((job, parts))
        else:
            others.append(job)
    state = start_state(query, value_dim, others, scaling)
    state.top *= LOG2_E
    for turn in range(max((len(parts) for _, parts in coded), default=0)):
        mine = [(job, parts[turn]) for job, parts in coded if turn < len(parts) and parts[turn].tokens]
        if mine:
            _fold_parts(query, kv_heads, mine, np.float32(scaling * LOG2_E), state, dot=dot)
    return state.top.numpy(), state.total.numpy(), state.acc.numpy()


def _fold_parts(
    query: Tensor,
    kv_heads: int,
    parts: Sequence[tuple[AttentionJob, CodedPart]],
    factor: Any,
    state: AttentionState,
    *,
    dot: bool,
) -> None:
    """Fold one part of each job into ``state [rows, heads]``; rows whose part is turned must not have seen any key."""
    rows = {job.first: torch.arange(job.first, job.first + job.count) for job, _ in parts}
    turned: dict[Turn, list[Tensor]] = {}
    for job, part in parts:
        if part.turn is not None:
            turned.setdefault(part.turn, []).append(rows[job.first])
    own = query if dot else query.float()
    if turned:
        own = own.clone()
    together = {turn: torch.cat(places) for turn, places in turned.items()}
    for turn, places in together.items():
        own[places] = turn.forward(query[places].float()).to(own.dtype)
    owner, described = np.zeros(query.shape[0], dtype=np.int64), np.zeros((len(parts), 5), dtype=np.int64)
    ends = [np.cumsum([0, *(len(table.sources) for table in tables)]) for tables in _streams(parts)]
    for number, (job, part) in enumerate(parts):
        owner[job.first : job.first + job.count] = number
        described[number] = part.tokens, *ends[0][number : number + 2], *ends[1][number : number + 2]
    spans = tuple((job.first, job.count, part.tokens) for job, part in parts)
    _fold(
        own.contiguous().view(torch.int32).numpy().view(np.uint32),
        factor,
        DOT if dot else FLOAT32,
        *(np.concatenate([table.sources for table in tables]) for tables in _streams(parts)),
        described,
        owner,
        kv_heads,
        *share_out_spans(spans, kv_heads, get_num_threads()),
        state.top.numpy(),
        state.total.numpy(),
        state.acc.numpy(),
    )
    for turn, places in together.items():
        state.acc[places] = turn.backward(state.acc[places])


def _streams(parts: Sequence[tuple[AttentionJob, CodedPart]]) -> tuple[list[SourceTable], list[SourceTable]]:
    return [part.keys for _, part in parts], [part.values for _, part in parts]
