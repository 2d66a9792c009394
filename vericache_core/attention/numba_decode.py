"""Panels out of packed codes: what ``numba_panels.py`` does for pages, for the sources of a coded stream.

A panel is laid out as there, with the numbers that the codes stand for, rounded to bfloat16 in the dot form. Whole runs of
sixteen codes take the vector path of ``numba_codes_bits.py``, whatever does not fill one goes number by number: a few rows
where sources meet, or everything for a layout that no vector path knows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from vericache_core.attention.numba_bits import as_pointer
from vericache_core.attention.numba_codes_bits import look_across, look_up, spread
from vericache_core.attention.numba_numbers import code, element, number, put, widen
from vericache_core.attention.numba_panels import BFLOAT16, DOT, FLOAT32, fetch, lay_out_panel
from vericache_core.attention.numba_tiles import LANES
from vericache_core.attention.sources import (
    BITS,
    BYTES,
    CHANNEL_GROUPS,
    CODES,
    EXACT,
    FORM,
    GROUP,
    KIND,
    LOW,
    SCALE,
    START,
    STOP,
    TABLE,
    TOKEN_GROUPS,
    UNITS,
)
from vericache_core.cache.pages import PAGE

TABLE_BITS = 4
"""Most bits of codes that are looked up in a table of sixteen."""


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _write_key_groups(
    form: Any, source: Any, head: Any, width: Any, token: Any, count: Any, column: Any, panel: Any, spare: Any
) -> None:
    """Keys whose groups are runs of tokens, and whole runs of sixteen: vectors along a row of the panel."""
    group, bits, each, size = source[GROUP], source[BITS], source[BYTES], 4 if source[KIND] == FLOAT32 else 2
    scales_at, lows_at, ramp = spare[0], spare[1], spare[2]
    scales, lows = carray(as_pointer(scales_at), width, np.float32), carray(as_pointer(lows_at), width, np.float32)
    ahead = PAGE // group * width * each  # what the next page needs is asked for a page early
    done = 0
    while done < count:
        unit, inside = (token + done) // group, (token + done) % group
        taken = min(group - inside, count - done)
        at = (head * source[UNITS] + unit) * width
        widen(source[KIND], source[SCALE] + at * size, width, scales_at)
        widen(source[KIND], source[LOW] + at * size, width, lows_at)
        codes, place = source[CODES] + at * each + inside * bits // 8, panel + (column + done) * 4
        if form == DOT:
            for d in range(0, width, 2):
                run, target = codes + d * each, place + d // 2 * PAGE * 4
                fetch(run + ahead)
                factors = (scales[d], lows[d], scales[d + 1], lows[d + 1])
                look_up(bits, run, run + each, ramp, factors, target, target + taken * 4)
        else:
            for d in range(width):
                run, target = codes + d * each, place + d * PAGE * 4
                for block in range(0, taken, LANES):
                    spread(bits, run + block * bits // 8, scales[d], lows[d], target + block * 4)
        done += taken


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _write_key_table(source: Any, head: Any, token: Any, count: Any, column: Any, panel: Any, scales_at: Any) -> None:
    """Keys of the form ``TABLE`` in the dot form, without their scales, which go to ``scales_at``; ``count`` fills runs."""
    bits, each = source[BITS], source[BYTES]
    at = head * source[UNITS] + token
    widen(source[KIND], source[SCALE] + at * (4 if source[KIND] == FLOAT32 else 2), count, scales_at + column * 4)
    rows = source[CODES] + at * each
    for run in range(0, count, LANES):
        for byte in range(0, each, 8):
            line = rows + run * each + byte
            fetch(line + PAGE * each)
            fetch(line + PAGE * each + 8 * each)
            target = panel + (byte * 4 // bits * PAGE + column + run) * 4
            look_across(bits, line, each, source[LOW], target, PAGE * 4)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _write_table(
    form: Any, source: Any, head: Any, width: Any, span: Any, keys: Any, panel: Any, panel_width: Any, at_row: Any
) -> None:
    """Tokens ``span`` (from, to) of the form ``TABLE`` number by number; ``at_row`` is the place of token 0 in the panel."""
    bits, each = source[BITS], source[BYTES]
    table = carray(as_pointer(source[LOW]), 1 << bits, np.float32)
    for token in range(span[0], span[1]):
        at = head * source[UNITS] + token
        scale, codes = number(source[KIND], source[SCALE], at), source[CODES] + at * each
        for d in range(width):
            value = table[code(codes, d, bits)] * scale
            if keys:
                put(form, panel, panel_width, d, at_row + token, value)
            else:
                put(form, panel, panel_width, at_row + token, d, value)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def write_keys(
    form: Any, sources: Any, which: Any, head: Any, width: Any, first: Any, last: Any, panel: Any, spare: Any
) -> Any:
    """Keys ``first`` to ``last`` (at most a page) into the columns of ``panel [width or pairs of it, PAGE]`` from 0 on.

    ``which`` is the range of sources to look at, ``spare`` are addresses of memory for scales, for lows, of the numbers from 0
    to 15, and of ``factors``: if the result is True, each column has yet to be multiplied by its one.
    """
    scaled = False
    factors = carray(as_pointer(spare[3]), PAGE, np.float32)
    for index in range(which[0], which[1]):
        source = sources[index]
        start, stop = max(source[START], first), min(source[STOP], last)
        if start >= stop:
            continue
        token, count, column = start - source[START], stop - start, start - first
        whole = token % LANES == 0 and column % LANES == 0 and source[GROUP] % LANES == 0
        if source[FORM] == TOKEN_GROUPS and whole and (form != DOT or source[BITS] <= TABLE_BITS):
            _write_key_groups(form, source, head, width, token, count, column, panel, spare)
        elif source[FORM] == EXACT and form == DOT and source[KIND] == BFLOAT16:
            rows = source[CODES] + (head * source[UNITS] + token) * width * 2
            pairs = carray(as_pointer(rows), (count, width // 2), np.uint32)
            words = carray(as_pointer(panel), (width // 2, PAGE), np.uint32)
            for pair in range(width // 2):
                for i in range(count):
                    words[pair, column + i] = pairs[i, pair]
        elif source[FORM] == TABLE:
            runs = 0
            if form == DOT and column % LANES == 0 and source[BYTES] % 8 == 0 and source[BITS] in (1, 2, 4):
                runs = count // LANES * LANES
                if not scaled:
                    factors[:] = np.float32(1.0)
                    scaled = True
                _write_key_table(source, head, token, runs, column, panel, spare[3])
            _write_table(form, source, head, width, (token + runs, token + count), True, panel, PAGE, column - token)
        else:
            for d in range(width):
                for i in range(count):
                    put(form, panel, PAGE, d, column + i, element(source, head, width, token + i, d))
    return scaled


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def _write_value_groups(
    form: Any, source: Any, head: Any, width: Any, token: Any, count: Any, panel: Any, panel_width: Any, spare: Any
) -> None:
    """Values whose groups are runs of channels, and whole runs of sixteen: vectors along a row of the panel."""
    group, bits, each, size = source[GROUP], source[BITS], source[BYTES], 4 if source[KIND] == FLOAT32 else 2
    scales_at, lows_at, base = spare[0], spare[1], spare[2]
    groups = width // group
    at, numbers = (head * source[UNITS] + token) * groups, count * groups
    scales, lows = carray(as_pointer(scales_at), numbers, np.float32), carray(as_pointer(lows_at), numbers, np.float32)
    widen(source[KIND], source[SCALE] + at * size, numbers, scales_at)
    if source[FORM] == TABLE:
        base = source[LOW]
        lows[:] = np.float32(0.0)
    else:
        widen(source[KIND], source[LOW] + at * size, numbers, lows_at)
    codes, step = source[CODES] + at * each, groups * each
    ahead = PAGE * step  # what the next page needs is asked for a page early
    if form == DOT:
        for i in range(0, count, 2):
            for g in range(groups):
                one, other = i * groups + g, (i + 1) * groups + g
                run, target = codes + one * each, panel + (i // 2 * panel_width + g * group) * 4
                fetch(run + ahead)
                factors = (scales[one], lows[one], scales[other], lows[other])
                look_up(bits, run, run + step, base, factors, target, target + group * 4)
    else:
        for i in range(count):
            for g in range(groups):
                one = i * groups + g
                run, target = codes + one * each, panel + (i * panel_width + g * group) * 4
                for block in range(0, group, LANES):
                    spread(bits, run + block * bits // 8, scales[one], lows[one], target + block * 4)


@njit(error_model="numpy")  # type: ignore[untyped-decorator]
def write_values(
    form: Any, sources: Any, which: Any, head: Any, width: Any, first: Any, last: Any, panel: Any, panel_width: Any, spare: Any
) -> None:
    """Values ``first`` to ``last`` (at most a page) into the rows of ``panel [PAGE or pairs of it, panel_width]`` from 0 on.

    In the dot form an odd number of rows is followed by one of zeros. ``which`` and ``spare`` as in :func:`write_keys`.
    """
    unit = 2 if form == DOT else 1
    for index in range(which[0], which[1]):
        source = sources[index]
        start, stop = max(source[START], first), min(source[STOP], last)
        if start >= stop:
            continue
        token, count, row = start - source[START], stop - start, start - first
        head_rows = min(row % unit, count)  # the second of a pair that another source begins
        body = (count - head_rows) // unit * unit
        target = panel + (row + head_rows) // unit * panel_width * 4
        if source[FORM] == EXACT and (form != DOT or source[KIND] == BFLOAT16):
            rows = source[CODES] + (head * source[UNITS] + token + head_rows) * width * (4 if source[KIND] == FLOAT32 else 2)
            lay_out_panel(DOT if form == DOT else source[KIND], rows, body // unit, width, target, panel_width, (rows, 0))
        elif (
            source[GROUP] % LANES == 0
            and (form != DOT or source[BITS] <= TABLE_BITS)
            and (source[FORM] == CHANNEL_GROUPS or (source[FORM] == TABLE and form == DOT))
        ):
            _write_value_groups(form, source, head, width, token + head_rows, body, target, panel_width, spare)
        elif source[FORM] == TABLE:
            _write_table(form, source, head, width, (token, token + count), False, panel, panel_width, row - token)
            continue
        else:
            body = 0
        for i in range(count):
            if not head_rows <= i < head_rows + body:
                for d in range(width):
                    put(form, panel, panel_width, row + i, d, element(source, head, width, token + i, d))
    if (last - first) % unit:
        for d in range(width):
            put(form, panel, panel_width, last - first, d, np.float32(0.0))
