"""Where the rows of a coded stream lie in memory, as numbers for a compiled kernel; imports no Numba by itself.

A stream (:class:`vericache_core.coded.CodedRows`) is a few sources in order: segments of codes, then exact rows. A source is
one row of an int64 table, the columns are named below. Kernels follow the addresses blindly, so whatever is not exactly as
:class:`CodeLayout` promises gives no table, and the stream is attended to by decoding it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vericache_core.attention.layouts import CodeLayout
from vericache_core.packing import packed_size

if TYPE_CHECKING:
    from vericache_core.coded import CodedRows

EXACT, TOKEN_GROUPS, CHANNEL_GROUPS, TABLE = range(4)
"""Forms of a source: exact rows, or one of :class:`CodeLayout`."""
FORMS = {"token-groups": TOKEN_GROUPS, "channel-groups": CHANNEL_GROUPS, "table": TABLE}
KINDS = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
"""How exact rows, scales and lows lie in memory; the numbers of ``numba_panels.FORMS``."""
START, STOP, FORM, BITS, GROUP, BYTES, KIND, CODES, SCALE, LOW, UNITS, FIELDS = range(12)
"""Columns: first token and token after the last; ``FORM``; bits of a code, elements and bytes of a group; ``KINDS``; addresses
of codes (or exact rows), scales, and lows (or the table, float32, filled up to 16 numbers); units that a KV head holds."""
TABLE_LEAST = 16

Index = npt.NDArray[np.int64]


class Turn(Protocol):
    """What a source's rows need that live in a rotated space; equal objects turn alike."""

    def forward(self, query: Tensor) -> Tensor:
        """Queries ``[n, heads, head_dim]`` float32 to the space of the keys."""

    def backward(self, acc: Tensor) -> Tensor:
        """Weighted sums ``[n, heads, value_dim]`` float32 back from the space of the values."""


@dataclass(frozen=True, eq=False)
class CodedPart:
    """``tokens`` consecutive rows of a compressed prefix, their keys and their values."""

    keys: SourceTable
    values: SourceTable
    tokens: int
    turn: Turn | None = None

    def fits(self, kv_heads: int, head_dim: int, value_dim: int) -> bool:
        """Whether these are rows of such a layer, every token of them in both streams."""
        shapes = [(table.kv_heads, table.width, table.tokens) for table in (self.keys, self.values)]
        return shapes == [(kv_heads, head_dim, self.tokens), (kv_heads, value_dim, self.tokens)]


@dataclass(frozen=True, eq=False)
class SourceTable:
    """``sources`` int64 ``[n, FIELDS]``; ``held`` keeps what they point at alive."""

    sources: Index
    held: tuple[Tensor, ...]
    kv_heads: int
    width: int

    @property
    def tokens(self) -> int:
        return int(self.sources[-1, STOP]) if len(self.sources) else 0


def codes_of(rows: CodedRows) -> SourceTable | None:
    """The encoded part of a stream; ``None`` where a kernel cannot read it."""
    kv_heads, width = rows.exact.shape[0], rows.exact.shape[2]
    sources: list[list[int]] = []
    held: list[Tensor] = []
    start = 0
    for segment in rows.segments:
        layout = rows.codec.layout
        read = None if layout is None else _code_fields(layout, segment.codes, segment.tokens, kv_heads, width)
        if read is None:
            return None
        fields, tensors = read
        sources.append([start, start + segment.tokens, *fields])
        held.extend(tensors)
        start += segment.tokens
    return SourceTable(_table(sources), tuple(held), kv_heads, width)


def exact_of(held: Tensor, start: int = 0) -> SourceTable | None:
    """Exact rows ``[kv_heads, tokens, width]``, the first of which is token ``start``."""
    if held.dtype not in KINDS or not _readable(held):
        return None
    kv_heads, tokens, width = held.shape
    if not tokens:
        return SourceTable(_table([]), (), kv_heads, width)
    fields = [start, start + tokens, EXACT, 0, 1, 0, KINDS[held.dtype], held.data_ptr(), 0, 0, tokens]
    return SourceTable(_table([fields]), (held,), kv_heads, width)


def joined(tables: Sequence[SourceTable]) -> SourceTable:
    """Tables of one stream, one after the other."""
    held = tuple(tensor for table in tables for tensor in table.held)
    return SourceTable(np.concatenate([table.sources for table in tables]), held, tables[0].kv_heads, tables[0].width)


def _table(sources: list[list[int]]) -> Index:
    return np.array(sources, dtype=np.int64).reshape(-1, FIELDS)


def _readable(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def _code_fields(
    layout: CodeLayout, codes: Mapping[str, Tensor], tokens: int, kv_heads: int, width: int
) -> tuple[list[int], tuple[Tensor, ...]] | None:
    """The columns from ``FORM`` on and what they point at, if everything is as the layout promises."""
    form, group = FORMS[layout.form], width if layout.form == "table" else layout.group
    if group < 1 or (form == CHANNEL_GROUPS and width % group):
        return None
    each = packed_size(group, layout.bits)
    units, groups = (-(-tokens // group), width) if form == TOKEN_GROUPS else (tokens, width // group)
    packed, scale = codes.get("codes"), codes.get("scale")
    low = codes.get("low") if layout.table is None else _filled_up(layout.table, layout.bits)
    if packed is None or scale is None or low is None or not all(_readable(part) for part in (packed, scale, low)):
        return None
    lows = kv_heads * units * groups if layout.table is None else max(1 << layout.bits, TABLE_LEAST)
    fits = (
        packed.dtype == torch.uint8
        and packed.shape[:2] == scale.shape[:2] == (kv_heads, units)
        and packed.numel() == kv_heads * units * groups * each
        and scale.numel() == kv_heads * units * groups
        and scale.dtype in KINDS
        and low.numel() == lows
        and low.dtype == (scale.dtype if layout.table is None else torch.float32)
    )
    if not fits:
        return None
    places = [part.data_ptr() for part in (packed, scale, low)]
    return [form, layout.bits, group, each, KINDS[scale.dtype], *places, units], (packed, scale, low)


@lru_cache(maxsize=64)
def _filled_up(table: Tensor, bits: int) -> Tensor | None:
    """A table of ``2 ** bits`` numbers that can be read by whole vectors, or ``None`` if it is none."""
    if table.dtype != torch.float32 or table.shape != (1 << bits,) or table.device.type != "cpu":
        return None
    return torch.cat([table, table.new_zeros(max(0, TABLE_LEAST - len(table)))])
