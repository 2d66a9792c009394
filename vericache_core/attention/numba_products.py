"""What attention kernels on the CPU are made of: products in tiles, the softmax of a page, scratch memory.

Numba puts these into every kernel that calls them: a kernel's file must be touched for its cached code to follow a change.
"""

from __future__ import annotations

from math import e, log2
from typing import Any

import numpy as np
from numba import njit

from vericache_core.attention.numba_panels import DOT, LINE
from vericache_core.attention.numba_softmax import make_soften, power_of_two
from vericache_core.attention.numba_tiles import COLUMNS, TILE, has_dot, make_tile

LOG2_E = log2(e)
HAVE_DOT = has_dot()

_float32_tile, _soften_exact = make_tile("float32"), make_soften(rounded=False)
# Without the instruction the names must exist and are never called.
dot_tile = make_tile("dot") if HAVE_DOT else _float32_tile
_soften_rounded = make_soften(rounded=True) if HAVE_DOT else _soften_exact


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def product(
    form: Any, rows: Any, factors: Any, panel: Any, count: Any, start: Any, target: Any, columns: Any, ahead: Any
) -> None:
    """``target = start + factors @ panel`` in tiles: ``count`` rows of the panel, ``columns`` of it, a multiple of ``COLUMNS``.

    ``factors``, ``panel``, ``start`` and ``target`` are (address, step in bytes). On the way it asks for cache lines, as
    many as all tiles together have rows of the panel: ``ahead`` is (address, most).
    """
    (a, a_step), (b, b_step), (first, first_step), (c, c_step) = factors, panel, start, target
    next_line, lines = ahead
    for row in range(0, rows, TILE):
        tall = min(rows - row, TILE)
        for column in range(0, columns * 4, COLUMNS * 4):
            fetched = (next_line, LINE if lines > 0 else 0)
            next_line, lines = next_line + count * fetched[1], lines - count
            own, wide = (a + row * a_step, a_step), (b + column, b_step)
            old, new = (first + row * first_step + column, first_step), (c + row * c_step + column, c_step)
            if form == DOT:
                dot_tile(tall, own, wide, count, old, new, fetched)
            else:
                _float32_tile(tall, own, wide, count, old, new, fetched)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def soften(form: Any, scores: Any, pairs: Any, factor: Any, begin: Any, end: Any, top: Any) -> Any:
    """See ``numba_softmax.py``; the dot form multiplies rounded weights."""
    if form == DOT:
        return _soften_rounded(scores, pairs, factor, begin, end, top)
    return _soften_exact(scores, pairs, factor, begin, end, top)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def take_in(form: Any, scores: Any, pairs: Any, factor: Any, begin: Any, end: Any, top: Any, total: Any, sums: Any) -> Any:
    """Scores of a page into the running softmax of a row: weights in their place, the row's ``sums`` rescaled if its largest
    score has grown. Returns its new ``top`` and ``total``.
    """
    peak, mass = soften(form, scores, pairs, factor, begin, end, top)
    if peak != top:
        decay = power_of_two(top - peak)
        total *= decay
        for d in range(len(sums)):
            sums[d] *= decay
    return peak, total + mass


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def carve(sizes: Any) -> Any:
    """Addresses of blocks of ``sizes`` bytes, each on cache lines of its own, and the array that they lie in."""
    total = LINE
    for size in sizes:
        total += (size + LINE - 1) // LINE * LINE
    array = np.empty(total, np.uint8)
    places = np.empty(len(sizes), np.int64)
    # Signed, because Numba turns a sum of signed and unsigned integers into a float.
    place = (np.int64(array.ctypes.data) + LINE - 1) // LINE * LINE
    for index, size in enumerate(sizes):
        places[index] = place
        place += (size + LINE - 1) // LINE * LINE
    return places, array
