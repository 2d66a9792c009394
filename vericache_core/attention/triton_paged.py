"""The fixed-block attention of the law over paged rows as Triton kernels.

One program takes one (row, KV head, chunk of ``CHUNK`` keys): it walks its keys in blocks at absolute positions,
in order, for the query heads of that KV head. A second kernel merges the chunks of each row in order. Which
blocks a row walks depends on its own ``[start, limit)`` only, and scalars that change with the company a row is in
(the number of chunks) are kept out of Triton's specialization, so every row runs the same code.

Per-row and per-head limits make it the draft attention over ragged token-dropped KV as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from vericache_core.attention.paged import AttentionJob, start_state
from vericache_core.attention.places import lay_out
from vericache_core.attention.triton_online import GROUP_LEAST, LAUNCH, Partials, block_for, fold_tile, on_device, padded
from vericache_core.cache.pages import PAGE

CHUNK = 4 * PAGE
"""Keys that one program walks; part of what decides the bits."""
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit  # type: ignore[untyped-decorator]
def store_kernel(  # type: ignore[no-untyped-def]
    new_keys,
    new_values,
    key_pages,
    value_pages,
    tables,
    limits,
    KV: tl.constexpr,  # noqa: N803
    KV_HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    HEAD_PAD: tl.constexpr,  # noqa: N803
    VALUE_DIM: tl.constexpr,  # noqa: N803
    VALUE_PAD: tl.constexpr,  # noqa: N803
    PAGE: tl.constexpr,  # noqa: N803
):
    """Program (row, KV head): store the new row at index ``limits[row, head] - 1``; a limit of 0 stores nothing."""
    row, head = tl.program_id(0), tl.program_id(1)
    index = tl.load(limits + row * KV_HEADS + head).to(tl.int32) - 1
    if index >= 0:
        entry = tl.load(tables + row) + index // PAGE
        slot = index % PAGE
        keys = tl.load(key_pages + entry).to(tl.pointer_type(KV))
        values = tl.load(value_pages + entry).to(tl.pointer_type(KV))
        d, v = tl.arange(0, HEAD_PAD), tl.arange(0, VALUE_PAD)
        at = row * KV_HEADS + head
        fresh = tl.load(new_keys + at * HEAD_DIM + d, mask=d < HEAD_DIM)
        tl.store(keys + (head * HEAD_DIM + d) * PAGE + slot, fresh, mask=d < HEAD_DIM)
        fresh = tl.load(new_values + at * VALUE_DIM + v, mask=v < VALUE_DIM)
        tl.store(values + (head * PAGE + slot) * VALUE_DIM + v, fresh, mask=v < VALUE_DIM)


@triton.jit(do_not_specialize=["chunks"])  # type: ignore[untyped-decorator]
def walk_kernel(  # type: ignore[no-untyped-def]
    query,
    key_pages,
    value_pages,
    tables,
    starts,
    limits,
    part_top,
    part_total,
    part_acc,
    chunks,
    KV: tl.constexpr,  # noqa: N803
    KV_HEADS: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    GROUP_PAD: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    HEAD_PAD: tl.constexpr,  # noqa: N803
    VALUE_DIM: tl.constexpr,  # noqa: N803
    VALUE_PAD: tl.constexpr,  # noqa: N803
    PAGE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    CHUNK: tl.constexpr,  # noqa: N803
):
    """Program (row, KV head, chunk): partial state of the chunk's keys inside ``[starts[row], limits[row, head])``."""
    row, kv_head, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    g, n = tl.arange(0, GROUP_PAD), tl.arange(0, BLOCK)
    d, v = tl.arange(0, HEAD_PAD), tl.arange(0, VALUE_PAD)
    slot = (row * KV_HEADS + kv_head) * GROUP + g
    begin = tl.maximum(tl.load(starts + row).to(tl.int32), chunk * CHUNK)
    end = tl.minimum(tl.load(limits + row * KV_HEADS + kv_head).to(tl.int32), (chunk + 1) * CHUNK)
    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    at = slot * chunks + chunk
    if begin < end:
        total = tl.zeros([GROUP_PAD], tl.float32)
        acc = tl.zeros([GROUP_PAD, VALUE_PAD], tl.float32)
        mine = tl.load(
            query + slot[:, None] * HEAD_DIM + d[None, :], mask=(g < GROUP)[:, None] & (d < HEAD_DIM)[None, :], other=0.0
        )
        table = tl.load(tables + row)
        for first in range(begin // BLOCK * BLOCK, end, BLOCK):
            entry = table + first // PAGE
            keys_at = tl.multiple_of(tl.load(key_pages + entry).to(tl.pointer_type(KV)), 16)
            values_at = tl.multiple_of(tl.load(value_pages + entry).to(tl.pointer_type(KV)), 16)
            column = tl.multiple_of(first % PAGE, BLOCK) + n
            seen = (first + n >= begin) & (first + n < end)
            # Keys are read whether seen or not (the page is there, and an unmasked row loads in one go): their
            # scores are hidden. Values that are not seen must not be read, because 0 * NaN is NaN.
            keys = tl.load(
                keys_at + (kv_head * HEAD_DIM + d)[:, None] * PAGE + column[None, :], mask=(d < HEAD_DIM)[:, None], other=0.0
            ).to(tl.float32)
            values = tl.load(
                values_at + (kv_head * PAGE + column)[:, None] * VALUE_DIM + v[None, :],
                mask=seen[:, None] & (v < VALUE_DIM)[None, :],
                other=0.0,
            ).to(tl.float32)
            top, total, acc = fold_tile(mine, keys, values, seen, top, total, acc)
        tl.store(part_total + at, total, mask=g < GROUP)
        tl.store(part_acc + at[:, None] * VALUE_DIM + v[None, :], acc, mask=(g < GROUP)[:, None] & (v < VALUE_DIM)[None, :])
    tl.store(part_top + at, top, mask=g < GROUP)


def attend_triton(query: Tensor, keys: Tensor, values: Tensor, jobs: Sequence[AttentionJob], scaling: float = 1.0) -> Tensor:
    """Same contract as :func:`vericache_core.attention.paged.attend_reference`.

    CUDA tensors, or CPU tensors under ``TRITON_INTERPRET=1``.
    """
    rows, heads, head_dim = query.shape
    kv_heads, value_dim, device = keys.shape[1], values.shape[2], query.device
    query = query.float() * scaling
    if not jobs:
        return query.new_zeros((rows, heads, value_dim))
    at = lay_out(jobs, rows, kv_heads)
    key_pages, value_pages, tables_at, starts_at, limits_at = _upload(
        device, at.key_pages, at.value_pages, at.tables, at.starts, at.limits
    )
    state = start_state(query, value_dim, jobs)
    parts = Partials(rows * heads, -(-int(at.limits.max()) // CHUNK), value_dim, device)
    kv, group, block = DTYPES[keys.dtype], heads // kv_heads, min(block_for(head_dim), block_for(value_dim))
    widths = (head_dim, padded(head_dim), value_dim, padded(value_dim), PAGE)
    with on_device(device):
        store_kernel[(rows, kv_heads)](
            keys.contiguous(),
            values.contiguous(),
            key_pages,
            value_pages,
            tables_at,
            limits_at,
            kv,
            kv_heads,
            *widths,
            **LAUNCH,
        )
        walk_kernel[(rows, kv_heads, parts.chunks)](
            query.contiguous(),
            key_pages,
            value_pages,
            tables_at,
            starts_at,
            limits_at,
            *parts.tensors(),
            parts.chunks,
            kv,
            kv_heads,
            group,
            padded(group, GROUP_LEAST),
            *widths,
            block,
            CHUNK,
            **LAUNCH,
        )
        parts.merge_into(state)
    return state.output()


def _upload(device: torch.device, *arrays: npt.NDArray[np.int64]) -> list[Tensor]:
    """The arrays on ``device``, flat, in one copy; each starts at a multiple of 16 bytes."""
    sizes = [array.size + array.size % 2 for array in arrays]
    packed = np.zeros(sum(sizes), dtype=np.int64)
    offsets = np.cumsum([0, *sizes])
    for array, offset in zip(arrays, offsets, strict=False):
        packed[offset : offset + array.size] = array.reshape(-1)
    moved = torch.from_numpy(packed).to(device)
    return [moved[offset : offset + size] for offset, size in zip(offsets, sizes, strict=False)]
