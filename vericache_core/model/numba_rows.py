"""The small operations of a decoder layer on rows, compiled for the CPU (needs Numba, no C compiler).

Each kernel does for every row what ``rows_reference.py`` does in torch, rounding to the model's dtype in the same places.
A row runs one fixed sequence of instructions that depends on its width alone, so its bits do not depend on its company.
Sums of squares add up in ``LANES`` interleaved parts that are folded in halves, where torch has an order of its own; the
exponential is a polynomial. Everything else equals torch bit for bit.

Rows lie one after the other at addresses; ``form`` says in which dtype. A kernel reads a row into float32 scratch, works
there, and writes it back: loops that stay in the first-level cache and that LLVM turns into vector code. The threads are
those of products and attention, which are awake while a step runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, get_num_threads, njit, prange

from vericache_core.attention.numba_bits import as_pointer
from vericache_core.attention.numba_panels import BFLOAT16
from vericache_core.attention.numba_products import LOG2_E
from vericache_core.attention.numba_softmax import EXACT, SHIFT

LANES = 64
ROWS_PER_THREAD = 4
"""Fewer are done before a second thread has begun."""
_LOG2_E, _SHIFT = np.float32(LOG2_E), np.float32(SHIFT)
_P1, _P2, _P3, _P4, _P5, _P6 = (np.float32(factor) for factor in EXACT)
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)
_LOW, _HIGH = np.float32(-127.0), np.float32(128.0)


def threads_for(rows: int) -> int:
    """Threads among which the rows of a step are shared out."""
    threads: int = get_num_threads()
    return max(1, min(threads, rows // ROWS_PER_THREAD))


@njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _read(form: Any, address: Any, width: Any, row: Any) -> None:
    """``row [width]`` float32 from the numbers at ``address``."""
    if form == BFLOAT16:
        halves, words = carray(as_pointer(address), width, np.uint16), row.view(np.uint32)
        for i in range(width):
            words[i] = np.uint32(halves[i]) << np.uint32(16)
    else:
        floats = carray(as_pointer(address), width, np.float32)
        for i in range(width):
            row[i] = floats[i]


@njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def write_row(form: Any, row: Any, width: Any, address: Any) -> None:
    """Store ``row``, rounded to nearest even. What is not a number stays so: it has no low bits that could carry over."""
    if form == BFLOAT16:
        halves, words = carray(as_pointer(address), width, np.uint16), row.view(np.uint32)
        for i in range(width):
            bits = words[i]
            halves[i] = np.uint16(np.uint32(bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16))
    else:
        floats = carray(as_pointer(address), width, np.float32)
        for i in range(width):
            floats[i] = row[i]


@njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _round(form: Any, row: Any, width: Any) -> None:
    """Round to the form, in place."""
    if form == BFLOAT16:
        words = row.view(np.uint32)
        for i in range(width):
            bits = words[i]
            words[i] = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) & np.uint32(0xFFFF0000)


@njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _normalise(form: Any, row: Any, width: Any, eps: Any, weight: Any) -> None:
    """``row * rsqrt(mean(row ** 2) + eps)``, rounded, times ``weight``; not rounded after that."""
    lanes = np.zeros(LANES, np.float32)
    whole = width // LANES * LANES
    for start in range(0, whole, LANES):
        part = row[start : start + LANES]
        for lane in range(LANES):
            lanes[lane] += part[lane] * part[lane]
    for i in range(whole, width):
        lanes[i - whole] += row[i] * row[i]
    half = LANES // 2
    while half:
        for lane in range(half):
            lanes[lane] += lanes[half + lane]
        half //= 2
    factor = _ONE / np.sqrt(lanes[0] / np.float32(width) + eps)
    for i in range(width):
        row[i] *= factor
    _round(form, row, width)
    for i in range(width):
        row[i] *= weight[i]


@njit(parallel=True, error_model="numpy", cache=True)  # type: ignore[untyped-decorator]
def norm_rows(form: Any, rows: Any, width: Any, eps: Any, weight: Any, source: Any, target: Any, threads: Any) -> None:
    """RMSNorm of ``[rows, width]`` at ``source`` into ``target``; ``weight [width]``, all in the form."""
    step = width * (2 if form == BFLOAT16 else 4)
    for thread in prange(threads):
        row, factors = np.empty(width, np.float32), np.empty(width, np.float32)
        _read(form, weight, width, factors)
        for index in range(rows * thread // threads, rows * (thread + 1) // threads):
            _read(form, source + index * step, width, row)
            _normalise(form, row, width, eps, factors)
            write_row(form, row, width, target + index * step)


@njit(parallel=True, error_model="numpy", cache=True)  # type: ignore[untyped-decorator]
def add_norm_rows(
    form: Any, rows: Any, width: Any, eps: Any, weight: Any, one: Any, other: Any, total: Any, target: Any, threads: Any
) -> None:
    """``total = one + other``, rounded, and its RMSNorm into ``target``."""
    step = width * (2 if form == BFLOAT16 else 4)
    for thread in prange(threads):
        row, more, factors = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
        _read(form, weight, width, factors)
        for index in range(rows * thread // threads, rows * (thread + 1) // threads):
            _read(form, one + index * step, width, row)
            _read(form, other + index * step, width, more)
            for i in range(width):
                row[i] += more[i]
            _round(form, row, width)
            write_row(form, row, width, total + index * step)
            _normalise(form, row, width, eps, factors)
            write_row(form, row, width, target + index * step)


@njit(parallel=True, error_model="numpy", cache=True)  # type: ignore[untyped-decorator]
def add_rows(form: Any, rows: Any, width: Any, total: Any, other: Any, threads: Any) -> None:
    """``total += other``, both ``[rows, width]``."""
    step = width * (2 if form == BFLOAT16 else 4)
    for thread in prange(threads):
        row, more = np.empty(width, np.float32), np.empty(width, np.float32)
        for index in range(rows * thread // threads, rows * (thread + 1) // threads):
            _read(form, total + index * step, width, row)
            _read(form, other + index * step, width, more)
            for i in range(width):
                row[i] += more[i]
            write_row(form, row, width, total + index * step)


@njit(parallel=True, error_model="numpy", cache=True)  # type: ignore[untyped-decorator]
def gate_rows(form: Any, rows: Any, width: Any, source: Any, target: Any, threads: Any) -> None:
    """``silu(gate)``, rounded, times ``up``: ``source [rows, 2 * width]`` has gates first, ``target`` is ``[rows, width]``."""
    size = 2 if form == BFLOAT16 else 4
    for thread in prange(threads):
        gate, up, power = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
        scale = np.empty(width, np.float32)
        scale_words = scale.view(np.uint32)
        for index in range(rows * thread // threads, rows * (thread + 1) // threads):
            place = source + index * 2 * width * size
            _read(form, place, width, gate)
            _read(form, place + width * size, width, up)
            for i in range(width):  # exp(-gate) is power * scale, and infinite or 0 at the ends
                x = min(max(-gate[i] * _LOG2_E, _LOW), _HIGH)
                shifted = x + _SHIFT
                r = x - (shifted - _SHIFT)
                scale[i] = shifted
                power[i] = ((((((_P6 * r + _P5) * r + _P4) * r + _P3) * r + _P2) * r) + _P1) * r + _ONE
            for i in range(width):
                scale_words[i] <<= np.uint32(23)
            for i in range(width):
                gate[i] /= _ONE + power[i] * scale[i]
            _round(form, gate, width)
            for i in range(width):
                gate[i] *= up[i]
            write_row(form, gate, width, target + index * width * size)


@njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _rotate(form: Any, row: Any, width: Any, cos: Any, sin: Any, turned: Any) -> None:
    """``turned = row * cos + rotate_half(row) * sin``, each product rounded."""
    half = width // 2
    for i in range(half):
        turned[i] = -row[half + i] * sin[i]
    for i in range(half):
        turned[half + i] = row[i] * sin[half + i]
    _round(form, turned, width)
    for i in range(width):
        row[i] *= cos[i]
    _round(form, row, width)
    for i in range(width):
        turned[i] += row[i]


@njit(parallel=True, error_model="numpy", cache=True)  # type: ignore[untyped-decorator]
def rotate_rows(
    form: Any, rows: Any, sizes: Any, angles: Any, norms: Any, eps: Any, source: Any, targets: Any, threads: Any
) -> None:
    """Queries, keys and values of ``source [rows, (heads + 2 * kv_heads) * width]`` apart; the first two rotated.

    ``sizes`` are ``(heads, kv_heads, width)``, ``angles`` the addresses of cosines and sines ``[rows, width]``, ``targets``
    those of queries ``[rows, heads, width]``, keys and values ``[rows, kv_heads, width]``. ``norms`` are the addresses of
    RMSNorm weights ``[width]`` of query and key heads, which come before the rotation; 0 for none.
    """
    (heads, kv_heads, width), size = sizes, 2 if form == BFLOAT16 else 4
    line = width * size
    for thread in prange(threads):
        row, turned = np.empty(width, np.float32), np.empty(width, np.float32)
        cos, sin = np.empty(width, np.float32), np.empty(width, np.float32)
        query_weight, key_weight = np.empty(width, np.float32), np.empty(width, np.float32)
        if norms[0] != 0:
            _read(form, norms[0], width, query_weight)
            _read(form, norms[1], width, key_weight)
        for index in range(rows * thread // threads, rows * (thread + 1) // threads):
            _read(form, angles[0] + index * line, width, cos)
            _read(form, angles[1] + index * line, width, sin)
            place = source + index * (heads + 2 * kv_heads) * line
            for head in range(heads + kv_heads):
                _read(form, place + head * line, width, row)
                if norms[0] != 0:
                    _normalise(form, row, width, eps, query_weight if head < heads else key_weight)
                    _round(form, row, width)
                _rotate(form, row, width, cos, sin, turned)
                if head < heads:
                    write_row(form, turned, width, targets[0] + (index * heads + head) * line)
                else:
                    write_row(form, turned, width, targets[1] + (index * kv_heads + head - heads) * line)
            values = carray(as_pointer(place + (heads + kv_heads) * line), kv_heads * line, np.uint8)
            copies = carray(as_pointer(targets[2] + index * kv_heads * line), kv_heads * line, np.uint8)
            for i in range(kv_heads * line):
                copies[i] = values[i]
