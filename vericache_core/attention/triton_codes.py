"""Attention over packed codes: dequantized in registers, so that codes and scales are the only KV bytes read.

Keys and values are :class:`vericache_core.coded.CodedRows`, two streams of segments with boundaries of their own.
Wherever neither stream changes its source, one launch walks the tokens in chunks; all partial states are merged
in order at the end. The torch reference is ``CodedLayer.attend``: decode a block, fold it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from vericache_core.attention.layouts import CodeLayout
from vericache_core.attention.online import AttentionState
from vericache_core.attention.triton_bits import read_codes
from vericache_core.attention.triton_online import GROUP_LEAST, LAUNCH, Partials, block_for, fold_tile, on_device, padded
from vericache_core.coded import CodedRows, Codes
from vericache_core.packing import packed_size

CHUNK = 512
"""Tokens that one program walks."""
EXACT, TOKEN_GROUPS, CHANNEL_GROUPS, TABLE = range(4)
FORMS = {"token-groups": TOKEN_GROUPS, "channel-groups": CHANNEL_GROUPS, "table": TABLE}


@triton.jit  # type: ignore[untyped-decorator]
def read_tile(  # type: ignore[no-untyped-def]
    codes,
    scale,
    low,
    first_unit,
    token,
    channel,
    mask,
    FORM: tl.constexpr,  # noqa: N803
    BITS: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    BYTES: tl.constexpr,  # noqa: N803
):
    """float32 tile of one KV head, 0 where ``mask`` is False.

    ``token`` and ``channel`` are int32, one along each axis of the tile (in either order); ``first_unit`` is the
    index of the head's first unit (group of tokens, or token) in ``codes``; forms as in :class:`CodeLayout`, with
    ``low`` the table of the form ``TABLE``, and 0 for exact rows in ``codes``.
    """
    if FORM == 0:
        tile = tl.load(codes + (first_unit + token) * WIDTH + channel, mask=mask, other=0.0).to(tl.float32)
    elif FORM == 1:
        group = (first_unit + token // GROUP) * WIDTH + channel
        code = read_codes(codes, group * BYTES, token % GROUP, mask, BITS)
        factor = tl.load(scale + group, mask=mask, other=0.0).to(tl.float32)
        tile = code.to(tl.float32) * factor + tl.load(low + group, mask=mask, other=0.0).to(tl.float32)
    elif FORM == 2:
        group = (first_unit + token) * (WIDTH // GROUP) + channel // GROUP
        code = read_codes(codes, group * BYTES, channel % GROUP, mask, BITS)
        factor = tl.load(scale + group, mask=mask, other=0.0).to(tl.float32)
        tile = code.to(tl.float32) * factor + tl.load(low + group, mask=mask, other=0.0).to(tl.float32)
    else:
        unit = first_unit + token + channel * 0  # one address per element, as the mask wants
        code = read_codes(codes, unit * BYTES, channel, mask, BITS)
        tile = tl.load(low + code, mask=mask, other=0.0) * tl.load(scale + unit, mask=mask, other=0.0).to(tl.float32)
    return tile


@triton.jit(do_not_specialize=["tokens", "key_first", "value_first", "key_units", "value_units", "rows", "chunks", "done"])  # type: ignore[untyped-decorator]
def walk_codes_kernel(  # type: ignore[no-untyped-def]
    query,
    key_codes,
    key_scale,
    key_low,
    value_codes,
    value_scale,
    value_low,
    part_top,
    part_total,
    part_acc,
    tokens,
    key_first,
    value_first,
    key_units,
    value_units,
    rows,
    chunks,
    done,
    GROUP: tl.constexpr,  # noqa: N803
    GROUP_PAD: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    HEAD_PAD: tl.constexpr,  # noqa: N803
    VALUE_DIM: tl.constexpr,  # noqa: N803
    VALUE_PAD: tl.constexpr,  # noqa: N803
    KEY_FORM: tl.constexpr,  # noqa: N803
    KEY_BITS: tl.constexpr,  # noqa: N803
    KEY_GROUP: tl.constexpr,  # noqa: N803
    KEY_BYTES: tl.constexpr,  # noqa: N803
    VALUE_FORM: tl.constexpr,  # noqa: N803
    VALUE_BITS: tl.constexpr,  # noqa: N803
    VALUE_GROUP: tl.constexpr,  # noqa: N803
    VALUE_BYTES: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    CHUNK: tl.constexpr,  # noqa: N803
):
    """Program (row, KV head, chunk): partial state of ``CHUNK`` of the ``tokens`` tokens of this stretch.

    The stretch starts at token ``key_first`` of the key source and ``value_first`` of the value source; ``done``
    chunks came before it. ``query [heads, rows, HEAD_DIM]``, so a slot is ``head * rows + row``.
    """
    row, kv_head, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    g, n = tl.arange(0, GROUP_PAD), tl.arange(0, BLOCK)
    d, v = tl.arange(0, HEAD_PAD), tl.arange(0, VALUE_PAD)
    slot = (kv_head * GROUP + g) * rows + row
    at = slot * chunks + done + chunk
    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, VALUE_PAD], tl.float32)
    mine = tl.load(
        query + slot[:, None] * HEAD_DIM + d[None, :], mask=(g < GROUP)[:, None] & (d < HEAD_DIM)[None, :], other=0.0
    )
    key_base = kv_head.to(tl.int64) * key_units
    value_base = kv_head.to(tl.int64) * value_units
    for first in range(chunk * CHUNK, tl.minimum((chunk + 1) * CHUNK, tokens), BLOCK):
        seen = first + n < tokens
        key_token = (key_first + first + n)[None, :]
        keys = read_tile(
            key_codes,
            key_scale,
            key_low,
            key_base,
            key_token,
            d[:, None],
            (d < HEAD_DIM)[:, None] & seen[None, :],
            KEY_FORM,
            KEY_BITS,
            KEY_GROUP,
            HEAD_DIM,
            KEY_BYTES,
        )
        value_token = (value_first + first + n)[:, None]
        values = read_tile(
            value_codes,
            value_scale,
            value_low,
            value_base,
            value_token,
            v[None, :],
            seen[:, None] & (v < VALUE_DIM)[None, :],
            VALUE_FORM,
            VALUE_BITS,
            VALUE_GROUP,
            VALUE_DIM,
            VALUE_BYTES,
        )
        top, total, acc = fold_tile(mine, keys, values, seen, top, total, acc)
    tl.store(part_top + at, top, mask=g < GROUP)
    tl.store(part_total + at, total, mask=g < GROUP)
    tl.store(part_acc + at[:, None] * VALUE_DIM + v[None, :], acc, mask=(g < GROUP)[:, None] & (v < VALUE_DIM)[None, :])


@dataclass(frozen=True)
class Source:
    """Where the rows ``start .. stop`` of one stream lie: a segment's codes, or exact rows.

    Attributes:
        tensors: ``(codes, scale, low or table)``; for exact rows all three are the rows.
        units: units a KV head holds.
        shape: ``(FORM, BITS, GROUP, BYTES)`` of the kernel.
    """

    start: int
    stop: int
    tensors: tuple[Tensor, Tensor, Tensor]
    units: int
    shape: tuple[int, int, int, int]


def fold_codes(query: Tensor, state: AttentionState, keys: CodedRows, values: CodedRows, *, exact: bool = True) -> None:
    """Fold all rows of two coded streams into ``state``.

    CUDA tensors, or CPU tensors under ``TRITON_INTERPRET=1``.

    Args:
        query: ``[heads, rows, head_dim]`` float32, already scaled (rotated, if the keys' codes are).
        state: as :class:`AttentionState`, float32.
        keys: of which every segment's codec has a layout.
        values: the same.
        exact: False leaves out what comes after the encoded part of either stream.
    """
    heads, rows, head_dim = query.shape
    kv_heads, value_dim = keys.exact.shape[0], values.exact.shape[2]
    group = heads // kv_heads
    stretches = list(_stretches(_sources(keys, exact), _sources(values, exact)))
    counts = [-(-tokens // CHUNK) for _, _, tokens, _, _ in stretches]
    if not sum(counts) or not rows:
        return
    parts = Partials(heads * rows, sum(counts), value_dim, query.device)
    query, done = query.contiguous(), 0
    with on_device(query.device):
        for (key, value, tokens, key_first, value_first), count in zip(stretches, counts, strict=True):
            walk_codes_kernel[(rows, kv_heads, count)](
                query,
                *key.tensors,
                *value.tensors,
                *parts.tensors(),
                tokens,
                key_first,
                value_first,
                key.units,
                value.units,
                rows,
                parts.chunks,
                done,
                group,
                padded(group, GROUP_LEAST),
                head_dim,
                padded(head_dim),
                value_dim,
                padded(value_dim),
                *key.shape,
                *value.shape,
                block_for(max(head_dim, value_dim)) // 2,  # unpacking needs registers of its own
                CHUNK,
                **LAUNCH,
            )
            done += count
        parts.merge_into(state)


def _sources(rows: CodedRows, exact: bool) -> list[Source]:
    sources, start = [], 0
    for segment in rows.segments:
        layout = rows.codec.layout
        assert layout is not None
        sources.append(_coded(segment.codes, layout, start, start + segment.tokens))
        start += segment.tokens
    if exact and rows.exact.shape[1]:
        held = rows.exact.contiguous()
        sources.append(Source(start, rows.tokens, (held, held, held), held.shape[1], (EXACT, 8, 1, 1)))
    return sources


def _coded(codes: Codes, layout: CodeLayout, start: int, stop: int) -> Source:
    packed, scale = codes["codes"].contiguous(), codes["scale"].contiguous()
    low = codes["low"].contiguous() if layout.table is None else _table(layout, packed.device)
    shape = (FORMS[layout.form], layout.bits, layout.group, packed_size(layout.group, layout.bits))
    return Source(start, stop, (packed, scale, low), packed.shape[1], shape)


@lru_cache(maxsize=64)
def _table(layout: CodeLayout, device: torch.device) -> Tensor:
    """The table of ``layout`` on ``device``, moved there once."""
    assert layout.table is not None
    return layout.table.to(device)


def _stretches(keys: list[Source], values: list[Source]) -> Iterator[tuple[Source, Source, int, int, int]]:
    """``(key source, value source, tokens, first token in each)`` in order; the streams cut where either cuts."""
    for key in keys:
        for value in values:
            start, stop = max(key.start, value.start), min(key.stop, value.stop)
            if start < stop:
                yield key, value, stop - start, start - key.start, start - value.start
