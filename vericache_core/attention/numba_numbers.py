"""Numbers of coded rows one by one: what a code decodes to, and its place in a panel. The slow path of ``numba_decode.py``."""

# ruff: noqa: ARG001 (the code generators' signatures are Numba's)
from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

from vericache_core.attention.numba_bits import as_pointer
from vericache_core.attention.numba_panels import BFLOAT16, DOT, FLOAT32, float16_word
from vericache_core.attention.sources import (
    BITS,
    BYTES,
    CODES,
    EXACT,
    FORM,
    GROUP,
    KIND,
    LOW,
    SCALE,
    TABLE,
    TOKEN_GROUPS,
    UNITS,
)


@intrinsic  # type: ignore[untyped-decorator]
def _as_float(context: Any, word: Any) -> Any:
    """The float32 of a word."""

    def generate(_context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _context.get_value_type(signature.return_type))

    return types.float32(types.uint32), generate


@intrinsic  # type: ignore[untyped-decorator]
def _as_word(context: Any, number: Any) -> Any:
    """The word of a float32."""

    def generate(_context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], _context.get_value_type(signature.return_type))

    return types.uint32(types.float32), generate


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def number(kind: Any, address: Any, index: Any) -> Any:
    """Number ``index`` of those at ``address``, as float32."""
    if kind == FLOAT32:
        return carray(as_pointer(address), index + 1, np.float32)[index]
    half = carray(as_pointer(address), index + 1, np.uint16)[index]
    return _as_float(np.uint32(half) << np.uint32(16)) if kind == BFLOAT16 else _as_float(float16_word(half))


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def code(address: Any, index: Any, bits: Any) -> Any:
    """Code ``index`` of a run that starts at ``address``."""
    first, shift = index * bits // 8, index * bits % 8
    data = carray(as_pointer(address), first + 2, np.uint8)
    word = np.int64(data[first])
    if shift + bits > 8:
        word |= np.int64(data[first + 1]) << 8
    return word >> shift & ((1 << bits) - 1)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def element(source: Any, head: Any, width: Any, token: Any, channel: Any) -> Any:
    """What one number of a source decodes to; ``token`` counts within the source."""
    form, kind, group, units = source[FORM], source[KIND], source[GROUP], source[UNITS]
    if form == EXACT:
        return number(kind, source[CODES], (head * units + token) * width + channel)
    if form == TOKEN_GROUPS:
        at, within = (head * units + token // group) * width + channel, token % group
    else:
        at, within = (head * units + token) * (width // group) + channel // group, channel % group
    level = code(source[CODES] + at * source[BYTES], within, source[BITS])
    scale = number(kind, source[SCALE], at)
    if form == TABLE:
        return number(FLOAT32, source[LOW], level) * scale
    return np.float32(level) * scale + number(kind, source[LOW], at)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def put(form: Any, panel: Any, panel_width: Any, row: Any, column: Any, value: Any) -> None:
    """One number into a panel; ``row`` counts single rows in the dot form too."""
    word = _as_word(value)
    if form == DOT:
        halves = carray(as_pointer(panel), ((row // 2 + 1) * panel_width, 2), np.uint16)
        rounded = word + np.uint32(0x7FFF) + (word >> np.uint32(16) & np.uint32(1))
        halves[row // 2 * panel_width + column, row % 2] = np.uint16(rounded >> np.uint32(16))
    else:
        carray(as_pointer(panel), (row + 1) * panel_width, np.uint32)[row * panel_width + column] = word


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def widen(kind: Any, address: Any, count: Any, target: Any) -> None:
    """``count`` numbers at ``address`` as float32 at ``target``."""
    words = carray(as_pointer(target), count, np.uint32)
    if kind == FLOAT32:
        words[:] = carray(as_pointer(address), count, np.uint32)
        return
    halves = carray(as_pointer(address), count, np.uint16)
    if kind == BFLOAT16:
        for i in range(count):
            words[i] = np.uint32(halves[i]) << np.uint32(16)
    else:
        for i in range(count):
            words[i] = float16_word(halves[i])
