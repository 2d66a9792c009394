"""Panels: the keys or values of one page and KV head, laid out for the tiles of ``numba_tiles.py``.

A panel has a row of 32-bit words for each step of a tile: a float32 each, or, in the dot form, what two rows of bfloat16 hold
in one place side by side. A page is laid out once and then serves every row of a work item.
"""

# ruff: noqa: ARG001 (the code generators' signatures are Numba's)
from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic

from vericache_core.attention.numba_bits import as_pointer
from vericache_core.attention.numba_tiles import I16, I16S, I32, I32S, LANES, VectorWriter

DOT, FLOAT32, BFLOAT16, FLOAT16 = range(4)
FORMS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
"""How rows lie in memory; ``DOT`` for bfloat16 that is multiplied in pairs."""
LINE = 64
"""Bytes of a cache line."""


@intrinsic  # type: ignore[untyped-decorator]
def _interleave(context: Any, low: Any, high: Any, target: Any) -> Any:
    """Sixteen words at ``target`` from sixteen bfloat16 at ``low`` and as many at ``high``: addresses all."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        writer, (one, other, place) = VectorWriter(builder), arguments
        order = [x for lane in range(LANES) for x in (lane, LANES + lane)]
        rows = [writer.load(row, 0, I16S) for row in (one, other)]
        both = builder.shuffle_vector(*rows, ir.Constant(ir.VectorType(I32, 2 * LANES), order))
        writer.store(builder.bitcast(both, I32S), place, 0)
        return _context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def float16_word(context: Any, bits: Any) -> Any:
    """The word of a float32 from the bits of a float16."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        half = builder.bitcast(builder.trunc(arguments[0], I16), ir.HalfType())
        return builder.bitcast(builder.fpext(half, ir.FloatType()), I32)

    return types.uint32(types.uint16), generate


@intrinsic  # type: ignore[untyped-decorator]
def fetch(context: Any, address: Any) -> Any:
    """See :meth:`VectorWriter.fetch`."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        VectorWriter(builder).fetch(arguments[0])
        return _context.get_dummy_value()

    return types.void(types.int64), generate


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def lay_out_panel(form: Any, rows: Any, steps: Any, width: Any, panel: Any, panel_width: Any, ahead: Any) -> None:
    """``panel [steps, panel_width]`` (words) from the first ``width`` numbers of rows at ``rows``, both addresses.

    The rows lie one after the other; ``steps`` counts pairs of them in the dot form. What a panel holds beyond ``width``
    stays. On the way it asks for cache lines: ``ahead`` is (address, how many).
    """
    words = carray(as_pointer(panel), (steps, panel_width), np.uint32)
    halves = carray(as_pointer(rows), (steps * (2 if form == DOT else 1), width), np.uint16)
    floats = carray(as_pointer(rows), (steps, width), np.uint32)
    whole = width // LANES * LANES
    next_line, lines = ahead
    each = (lines + steps - 1) // steps
    for step in range(steps):
        for line in range(step * each, min((step + 1) * each, lines)):
            fetch(next_line + line * LINE)
        if form == DOT:
            low, target = rows + step * width * 4, panel + step * panel_width * 4
            for d in range(0, whole, LANES):
                _interleave(low + d * 2, low + (width + d) * 2, target + d * 4)
            for d in range(whole, width):
                words[step, d] = np.uint32(halves[2 * step, d]) | np.uint32(halves[2 * step + 1, d]) << np.uint32(16)
        elif form == FLOAT32:
            for d in range(width):
                words[step, d] = floats[step, d]
        elif form == BFLOAT16:
            for d in range(width):
                words[step, d] = np.uint32(halves[step, d]) << np.uint32(16)
        else:
            for d in range(width):
                words[step, d] = float16_word(halves[step, d])
