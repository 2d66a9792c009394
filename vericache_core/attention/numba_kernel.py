"""The fixed-block attention of the law as one compiled CPU kernel (needs Numba, no C compiler).

Each (row, head) pair runs one fixed sequence of operations over the pages, whoever shares the step and on
whichever thread it lands, so a row's result is row-invariant by construction:

- scores and weighted sums are the register tiles of ``numba_tiles.py``, in which every number is one chain of
  multiply-adds in order, however many rows share the tile;
- keys outside the row's ``[start, limit)`` get weight 0 and their values are never multiplied;
- the sum of weights is folded in halves, always the same ones, and ``exp`` is a polynomial of our own (``numba_softmax.py``).

Where queries and KV are bfloat16 and the CPU multiplies bfloat16 pairs, it does, and softmax weights are rounded
to bfloat16 before they meet the values (their sum is that of the rounded ones); accumulation is float32 either way.
Threads take (row block, KV head) items. The torch reference in ``paged.py`` computes the same attention in float32;
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

from vericache_core.attention.numba_bits import as_pointer
from vericache_core.attention.numba_softmax import make_soften
from vericache_core.attention.numba_tiles import COLUMNS, TILE, has_dot, make_tile
from vericache_core.attention.online import AttentionState
from vericache_core.attention.paged import AttentionJob
from vericache_core.attention.places import lay_out
from vericache_core.cache.pages import PAGE

ROW_BLOCK = 16
"""Most rows of one work item."""
DOT, FLOAT32, BFLOAT16, FLOAT16 = range(4)
FORMS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
HAVE_DOT = has_dot()
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}

_dot_tile = make_tile("dot" if HAVE_DOT else "bfloat16")  # without the instruction the name must exist and is never called
_soften_rounded, _soften_exact = make_soften(rounded=True), make_soften(rounded=False)
_float32_tile, _bfloat16_tile, _float16_tile = make_tile("float32"), make_tile("bfloat16"), make_tile("float16")


@njit(inline="always", error_model="numpy")  # type: ignore[untyped-decorator]
def address(array: Any) -> Any:
    """Where ``array`` lies; signed, because Numba turns a sum of signed and unsigned integers into a float."""
    return np.int64(array.ctypes.data)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _tile(
    form: Any, rows: Any, a: Any, a_step: Any, b: Any, b_step: Any, count: Any, c: Any, c_step: Any, columns: Any
) -> None:
    if form == DOT:
        _dot_tile(rows, a, a_step, b, b_step, count, c, c_step, columns)
    elif form == FLOAT32:
        _float32_tile(rows, a, a_step, b, b_step, count, c, c_step, columns)
    elif form == BFLOAT16:
        _bfloat16_tile(rows, a, a_step, b, b_step, count, c, c_step, columns)
    else:
        _float16_tile(rows, a, a_step, b, b_step, count, c, c_step, columns)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _weigh(form: Any, rows: Any, weights: Any, step: Any, low: Any, high: Any, values: Any, acc: Any, shape: Any) -> None:
    """``acc[r] += weights[r, low:high] @ values[low:high]``; ``low`` and ``high`` in rows of ``values`` (dot: pairs).

    ``weights``, ``values`` and ``acc`` are addresses; ``shape`` is (width of a number of values, value_dim,
    padded value_dim). A weight takes four bytes in either form: a float32, or a pair of bfloat16.
    """
    width, value_dim, padded = shape
    unit = 2 if form == DOT else 1
    line = value_dim * width
    for column in range(0, value_dim, COLUMNS):
        at = values + low * unit * line + column * width
        target, rest = acc + column * 4, value_dim - column
        _tile(form, rows, weights + low * 4, step, at, line, high - low, target, padded * 4, rest)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _weigh_half(weights: Any, begin: Any, end: Any, pair: Any, values: Any, acc: Any, spare: Any, shape: Any) -> None:
    """One pair of bfloat16 rows of which ``[begin, end)`` hides one: that one is read as zeros."""
    value_dim = shape[1]
    rows = carray(as_pointer(values), (PAGE, value_dim), np.uint16)
    for half in range(2):
        seen = begin <= 2 * pair + half < end
        for d in range(value_dim):
            spare[half, d] = rows[2 * pair + half, d] if seen else np.uint16(0)
    _weigh(DOT, 1, weights + pair * 4, 0, 0, 1, address(spare), acc, shape)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _weigh_alone(form: Any, weights: Any, units: Any, seen: Any, values: Any, acc: Any, spare: Any, shape: Any) -> None:
    """A single row against the rows of values that it sees within ``units``, in order."""
    begin, end = seen
    low, high = units
    if form != DOT:
        if high > low:
            _weigh(form, 1, weights, 0, low, high, values, acc, shape)
        return
    if low < high and 2 * low < begin:
        _weigh_half(weights, begin, end, low, values, acc, spare, shape)
        low += 1
    whole = min(high, end // 2)
    if whole > low:
        _weigh(form, 1, weights, 0, low, whole, values, acc, shape)
        low = whole
    if low < high:
        _weigh_half(weights, begin, end, low, values, acc, spare, shape)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _soften(form: Any, scores: Any, pairs: Any, scaling: Any, begin: Any, end: Any, top: Any) -> Any:
    """See ``numba_softmax.py``; the dot form multiplies rounded weights."""
    if form == DOT:
        return _soften_rounded(scores, pairs, scaling, begin, end, top)
    return _soften_exact(scores, pairs, scaling, begin, end, top)


@njit(parallel=True, error_model="numpy", cache=True)  # type: ignore[untyped-decorator]
def _attend(  # noqa: C901, PLR0912, PLR0915 (a kernel is one loop nest)
    query: Any,
    scaling: Any,
    form: Any,
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
    heads, words, value_dim = query.shape[1], query.shape[2], acc.shape[2]
    kv_heads = limits.shape[1]
    group = heads // kv_heads
    width = 4 if form == FLOAT32 else 2
    unit = 2 if form == DOT else 1
    padded = (value_dim + COLUMNS - 1) // COLUMNS * COLUMNS
    shape = (width, value_dim, padded)
    head_dim = words * unit
    line = words * 4
    for item in prange(items.shape[0] * kv_heads):
        block, kv_head = item // kv_heads, item % kv_heads
        low, high = items[block, 0], items[block, 1]
        table, first_head = tables[low], kv_head * group
        count = (high - low) * group
        mine = np.empty((count, words), np.uint32)
        sums = np.zeros((count, padded), np.float32)
        scores = np.empty((TILE, PAGE), np.float32)
        pairs = np.empty((TILE, PAGE), np.uint16)
        spare = np.empty((2, value_dim), np.uint16)
        first, last = starts[low], limits[low, kv_head]
        for row in range(low, high):
            first = min(first, starts[row])
            last = max(last, limits[row, kv_head])
            for head in range(group):
                for d in range(words):
                    mine[(row - low) * group + head, d] = query[row, first_head + head, d]
                for d in range(value_dim):
                    sums[(row - low) * group + head, d] = acc[row, first_head + head, d]
        weights, step = (address(pairs), PAGE * 2) if form == DOT else (address(scores), PAGE * 4)
        for page in range(first // PAGE, (last + PAGE - 1) // PAGE):
            keys = key_pages[table + page] + kv_head * head_dim * PAGE * width
            values = value_pages[table + page] + kv_head * value_dim * PAGE * width
            for tile in range(0, count, TILE):
                tall = min(TILE, count - tile)
                for r in range(tall):
                    for j in range(PAGE):
                        scores[r, j] = np.float32(0.0)
                for column in range(0, min(last - page * PAGE, PAGE), COLUMNS):
                    own, at, target = address(mine) + tile * line, keys + column * width, address(scores) + column * 4
                    _tile(form, tall, own, line, at, PAGE * width, words, target, PAGE * 4, COLUMNS)
                together_from, together_to = 0, PAGE
                for r in range(tall):
                    row, head = low + (tile + r) // group, first_head + (tile + r) % group
                    begin, end = max(starts[row] - page * PAGE, 0), min(limits[row, kv_head] - page * PAGE, PAGE)
                    together_from, together_to = max(together_from, begin), min(together_to, end)
                    if end <= begin:
                        continue
                    own, halves = address(scores) + r * PAGE * 4, address(pairs) + r * PAGE * 2
                    peak, decay, mass = _soften(form, own, halves, scaling, begin, end, top[row, head])
                    top[row, head] = peak
                    total[row, head] = total[row, head] * decay + mass
                    for d in range(padded):
                        sums[tile + r, d] *= decay
                # What all rows of the tile see is done together, the ends row by row: the same order for each row.
                common_from, common_to = (together_from + unit - 1) // unit, together_to // unit
                if common_to <= common_from:
                    common_from = common_to = 0
                for r in range(tall):
                    row = low + (tile + r) // group
                    begin, end = max(starts[row] - page * PAGE, 0), min(limits[row, kv_head] - page * PAGE, PAGE)
                    units = (begin // unit, common_from)
                    if end > begin and units[1] > units[0]:
                        target = address(sums) + (tile + r) * padded * 4
                        _weigh_alone(form, weights + r * step, units, (begin, end), values, target, spare, shape)
                if common_to > common_from:
                    target = address(sums) + tile * padded * 4
                    _weigh(form, tall, weights, step, common_from, common_to, values, target, shape)
                for r in range(tall):
                    row = low + (tile + r) // group
                    begin, end = max(starts[row] - page * PAGE, 0), min(limits[row, kv_head] - page * PAGE, PAGE)
                    units = (max(begin // unit, common_to), (end + unit - 1) // unit)
                    if end > begin and units[1] > units[0]:
                        target = address(sums) + (tile + r) * padded * 4
                        _weigh_alone(form, weights + r * step, units, (begin, end), values, target, spare, shape)
        for row in range(low, high):
            for head in range(group):
                mass = total[row, first_head + head]
                for d in range(value_dim):
                    acc[row, first_head + head, d] = sums[(row - low) * group + head, d] / mass


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
    output = torch.zeros((rows, heads, values.shape[2]), dtype=torch.float32)
    if not jobs:
        return output
    at = lay_out(jobs, rows, keys.shape[1])
    _store(_bits(keys), _bits(values), at.key_pages, at.value_pages, at.tables, at.limits, at.used)
    top = torch.full((rows, heads), float("-inf"))
    total = torch.zeros((rows, heads))
    for job in jobs:
        if job.prefix is not None:
            _attend_prefix(query, job, scaling, top, total, output)
    form = FORMS[keys.dtype]
    if HAVE_DOT and query.dtype == keys.dtype == torch.bfloat16 and query.shape[2] % 2 == 0:
        form, own = DOT, query
    else:
        own = query.float()
    places = (at.key_pages, at.value_pages, at.tables, at.limits, at.starts, _items(jobs))
    # Words of 32 bits either way (a pair of bfloat16, a float32): one type, so one compiled kernel.
    _attend(
        own.contiguous().view(torch.int32).numpy().view(np.uint32),
        np.float32(scaling),
        form,
        *places,
        top.numpy(),
        total.numpy(),
        output.numpy(),
    )
    return output


def _items(jobs: Sequence[AttentionJob]) -> npt.NDArray[np.int64]:
    """Row ranges ``[items, 2]`` for the threads: each job in even blocks."""
    items: list[tuple[int, int]] = []
    for job in jobs:
        each = -(-job.count // -(-job.count // ROW_BLOCK))
        stop = job.first + job.count
        items.extend((low, min(low + each, stop)) for low in range(job.first, stop, each))
    return np.array(items, dtype=np.int64)


def _attend_prefix(query: Tensor, job: AttentionJob, scaling: float, top: Tensor, total: Tensor, acc: Tensor) -> None:
    """Let the compressed prefix of ``job`` fill the state its rows start from."""
    assert job.prefix is not None
    mine = slice(job.first, job.first + job.count)
    state = AttentionState.fresh(query.shape[1], job.count, acc.shape[2])
    job.prefix.attend((query[mine].float() * scaling).transpose(0, 1).contiguous(), state)
    top[mine], total[mine], acc[mine] = state.top.T, state.total.T, state.acc.transpose(0, 1)


def _bits(rows: Tensor) -> npt.NDArray[Any]:
    """``[rows, kv_heads, width]`` as unsigned bit patterns."""
    view = rows.contiguous().view(_BITS[rows.dtype]).numpy()
    unsigned: npt.NDArray[Any] = view.view(np.uint32 if rows.dtype == torch.float32 else np.uint16)
    return unsigned
