"""The running softmax state as Triton device functions, and the kernel that merges partial states.

The key axis of a (row, KV head) is cut into fixed chunks, each walked by a program of its own; their partial
states are merged in order. Where a chunk starts depends on nothing but its number, so the arithmetic of a row
does not depend on what else runs: the counterpart of :class:`vericache_core.attention.online.AttentionState`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vericache_core.attention.online import AttentionState

GROUP_LEAST = 16
"""Query heads of a KV head are padded to at least so many: the smallest matrix product Triton offers."""

LAUNCH = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}
"""Fixed for every kernel, because they are part of what decides the bits. More stages only spill registers here."""


@triton.jit
def fold_tile(query, keys, values, seen, top, total, acc):  # type: ignore[no-untyped-def]
    """One block of keys folded in; all float32, returns the new ``(top, total, acc)``.

    ``query [G, D]``, ``keys [D, N]``, ``values [N, V]`` (zero where not seen), ``seen`` bool ``[N]``,
    ``top`` and ``total`` ``[G]``, ``acc [G, V]``.
    """
    scores = tl.dot(query, keys, input_precision="ieee")
    scores = tl.where(seen[None, :], scores, float("-inf"))
    peak = tl.maximum(top, tl.max(scores, 1))
    base = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp(scores - base[:, None])
    decay = tl.exp(top - base)
    total = total * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None] + tl.dot(weights, values, input_precision="ieee")
    return peak, total, acc


@triton.jit(do_not_specialize=["chunks"])  # type: ignore[untyped-decorator]
def merge_kernel(  # type: ignore[no-untyped-def]
    part_top,
    part_total,
    part_acc,
    top,
    total,
    acc,
    chunks,
    WIDTH: tl.constexpr,  # noqa: N803
    WIDTH_PAD: tl.constexpr,  # noqa: N803
):
    """Program ``slot``: fold the partial states ``[slots, chunks(, WIDTH)]`` into the state ``[slots(, WIDTH)]``, in order.

    A chunk whose ``top`` is ``-inf`` saw no key; it changes no bit and its ``acc`` is not read.
    """
    slot = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, WIDTH_PAD)
    inside = channel < WIDTH
    peak = tl.load(top + slot)
    mass = tl.load(total + slot)
    sums = tl.load(acc + slot * WIDTH + channel, mask=inside, other=0.0)
    for chunk in range(0, chunks):  # noqa: PIE808 (tl wants both)
        at = slot * chunks + chunk
        other = tl.load(part_top + at)
        if other != float("-inf"):
            higher = tl.maximum(peak, other)
            mine, theirs = tl.exp(peak - higher), tl.exp(other - higher)
            mass = mass * mine + tl.load(part_total + at) * theirs
            sums = sums * mine + tl.load(part_acc + at * WIDTH + channel, mask=inside, other=0.0) * theirs
            peak = higher
    tl.store(top + slot, peak)
    tl.store(total + slot, mass)
    tl.store(acc + slot * WIDTH + channel, sums, mask=inside)


class Partials:
    """Scratch for the partial states of ``slots`` (row, head) pairs, ``[slots, chunks(, width)]`` float32."""

    def __init__(self, slots: int, chunks: int, width: int, device: torch.device) -> None:
        self.slots, self.chunks, self.width = slots, chunks, width
        self.top = torch.empty((slots, chunks), dtype=torch.float32, device=device)
        self.total = torch.empty_like(self.top)
        self.acc = torch.empty((slots, chunks, width), dtype=torch.float32, device=device)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """``top, total [slots, chunks]`` and ``acc [slots, chunks, width]``."""
        return self.top, self.total, self.acc

    def merge_into(self, state: AttentionState) -> None:
        """Fold everything into ``state``, whose parts, flattened, are ``[slots(, width)]``."""
        state.top, state.total, state.acc = state.top.contiguous(), state.total.contiguous(), state.acc.contiguous()
        if self.slots and self.chunks:
            merge_kernel[(self.slots,)](
                *self.tensors(), state.top, state.total, state.acc, self.chunks, self.width, padded(self.width), **LAUNCH
            )


def padded(size: int, least: int = 16) -> int:
    """The power of two that a tile axis of ``size`` takes."""
    return max(least, 1 << (size - 1).bit_length())


def block_for(width: int) -> int:
    """Keys per tile: fewer where rows are wide, so that a tile stays in registers."""
    return 64 if width <= 128 else 32


def on_device(device: torch.device) -> Any:
    """Triton launches on the current device, which need not be the tensors' one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
