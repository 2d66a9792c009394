"""Linear layers of a few rows in register tiles, for CPUs that multiply bfloat16 pairs (needs Numba, no C compiler).

A weight is laid out once, in panels of ``COLUMNS`` outputs: a row of a panel holds, for two inputs, a pair of bfloat16 per
output, which is what ``numba_tiles.py`` reads. A step of few rows reads the weights at memory speed, one of many rows
multiplies at the speed of the instruction. Every output is one chain of multiply-adds over the inputs in order, rounded once,
so a row's bits depend neither on the rows beside it nor on the number of threads.

The threads are those of the attention kernel. A second library's threads would go on spinning for a while after each product,
on cores that attention needs, and the other way about (docs/adr/0016-products-in-one-pool.md has the measurements).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray, get_num_threads, njit, prange
from torch import Tensor

from vericache_core.attention.numba_bits import as_pointer
from vericache_core.attention.numba_panels import BFLOAT16, LINE
from vericache_core.attention.numba_products import HAVE_DOT, dot_tile
from vericache_core.attention.numba_tiles import COLUMNS, TILE, has_matrix_unit
from vericache_core.model.numba_rows import write_row

_PANEL_LINE = COLUMNS * 4
"""Bytes of a row of a panel: a pair of bfloat16 for each output."""


class TiledLinear:
    """``rows @ weight.T + bias``, accumulated in float32 and rounded once.

    Args:
        weight: ``[out, in]`` that :func:`tileable` accepts; copied.
        bias: ``[out]`` or None; copied.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._outputs, inputs = weight.shape
        self._blocks, self._pairs = -(-self._outputs // COLUMNS), inputs // 2
        padded = weight.new_zeros((self._blocks * COLUMNS, inputs))
        padded[: self._outputs] = weight.detach()
        by_output = padded.view(torch.int32).view(self._blocks, COLUMNS, self._pairs)
        self._panels = by_output.transpose(1, 2).contiguous()
        self._start = torch.zeros(self._blocks * COLUMNS)
        if bias is not None:
            self._start[: self._outputs] = bias.detach().float()

    def __call__(self, rows: Tensor) -> Tensor:
        """``[..., in]`` bfloat16 -> ``[..., out]`` bfloat16."""
        given = rows.reshape(-1, 2 * self._pairs).contiguous()
        result = rows.new_empty((*rows.shape[:-1], self._outputs))
        places = (given.data_ptr(), self._panels.data_ptr(), self._start.data_ptr(), result.data_ptr())
        _multiply(given.shape[0], self._pairs, self._outputs, *places, get_num_threads())
        return result


def tileable(weight: Tensor) -> bool:
    """Whether ``weight`` can be laid out here, and nothing faster is at hand: a CPU's matrix unit is."""
    paired = weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.shape[1] % 2 == 0
    return paired and HAVE_DOT and not has_matrix_unit()


def multiply_reference(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What :class:`TiledLinear` computes, in torch and float64; it may differ by a rounding."""
    total = rows.double() @ weight.double().T
    return (total if bias is None else total + bias.double()).to(rows.dtype)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _tile(tall: Any, source: Any, step: Any, panel: Any, pairs: Any, start: Any, sums: Any, ahead: Any, target: Any) -> None:
    """``tall`` rows at ``source`` against one panel; ``target`` is (address, bytes of a row, outputs that are wanted)."""
    dot_tile(tall, (source, step), (panel, _PANEL_LINE), pairs, (start, 0), (sums, _PANEL_LINE), ahead)
    place, line, wanted = target
    for row in range(tall):
        write_row(BFLOAT16, carray(as_pointer(sums + row * _PANEL_LINE), COLUMNS, np.float32), wanted, place + row * line)


@njit(parallel=True, error_model="numpy", cache=True)  # type: ignore[untyped-decorator]
def _multiply(rows: Any, pairs: Any, outputs: Any, source: Any, panels: Any, start: Any, target: Any, threads: Any) -> None:
    """Tiles in the order of the panels, shared out evenly; a panel's tiles ask for the next panel's cache lines."""
    tall, blocks, size = (rows + TILE - 1) // TILE, (outputs + COLUMNS - 1) // COLUMNS, pairs * _PANEL_LINE
    for thread in prange(threads):
        scratch = np.empty(TILE * COLUMNS + LINE, np.float32)
        sums = (np.int64(scratch.ctypes.data) + LINE - 1) // LINE * LINE
        for item in range(blocks * tall * thread // threads, blocks * tall * (thread + 1) // threads):
            block, part = divmod(item, tall)
            first, last = rows * part // tall, rows * (part + 1) // tall
            panel, column = panels + block * size, block * COLUMNS
            spot = (panel + size + part * pairs * LINE, LINE) if block + 1 < blocks else (panel, 0)
            place = (target + (first * outputs + column) * 2, outputs * 2, min(COLUMNS, outputs - column))
            own = source + first * pairs * 4
            _tile(last - first, own, pairs * 4, panel, pairs, start + column * 4, sums, spot, place)
        scratch[0] = np.float32(0.0)  # used to the end: Numba frees an array after its last use
