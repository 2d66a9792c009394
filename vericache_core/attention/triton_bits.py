"""Packed codes in Triton: reading one code where it lies, and pack/unpack as kernels of their own.

The bit order is that of :mod:`vericache_core.packing`, the torch reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vericache_core.attention.triton_online import LAUNCH, on_device
from vericache_core.packing import SUPPORTED_BITS, packed_size

BYTES_PER_PROGRAM = 1024


@triton.jit  # type: ignore[untyped-decorator]
def read_codes(packed, start, number, mask, BITS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Code ``number`` of the packed run that starts at byte ``start``, int32; tensors of one shape after broadcasting."""
    bit = number * BITS
    shift = bit % 8
    at = packed + (start + bit // 8)
    word = tl.load(at, mask=mask, other=0).to(tl.int32)
    if BITS == 3:  # the only width whose codes cross bytes
        word |= tl.load(at + 1, mask=mask & (shift > 5), other=0).to(tl.int32) << 8
    return (word >> shift) & ((1 << BITS) - 1)


@triton.jit(do_not_specialize=["runs", "count"])  # type: ignore[untyped-decorator]
def pack_kernel(  # type: ignore[no-untyped-def]
    codes,
    packed,
    runs,
    count,
    BITS: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
):
    """Each lane writes one byte of ``packed [runs, ceil(count * BITS / 8)]`` out of ``codes [runs, count]``."""
    width = (count * BITS + 7) // 8
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = place < runs.to(tl.int64) * width
    run, byte = place // width, (place % width).to(tl.int32)
    word = tl.zeros([SIZE], tl.int32)
    first = byte * 8 // BITS
    for step in tl.static_range(0, 8 // BITS + (2 if BITS == 3 else 0)):
        number = first + step
        offset = number * BITS - byte * 8  # negative where a code began in the byte before
        wanted = inside & (number < count) & (offset < 8)
        code = tl.load(codes + run * count + number, mask=wanted, other=0).to(tl.int32)
        word |= tl.where(offset < 0, code >> tl.maximum(-offset, 0), code << tl.maximum(offset, 0))
    tl.store(packed + place, (word & 255).to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["runs", "count"])  # type: ignore[untyped-decorator]
def unpack_kernel(  # type: ignore[no-untyped-def]
    packed,
    codes,
    runs,
    count,
    BITS: tl.constexpr,  # noqa: N803
    SIZE: tl.constexpr,  # noqa: N803
):
    """Each lane writes one code of ``codes [runs, count]``."""
    width = (count * BITS + 7) // 8
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = place < runs.to(tl.int64) * count
    run, number = place // count, (place % count).to(tl.int32)
    tl.store(codes + place, read_codes(packed, run * width, number, inside, BITS).to(tl.uint8), mask=inside)


def pack_triton(codes: Tensor, bits: int) -> Tensor:
    """Same bytes as :func:`vericache_core.packing.pack`; codes out of range are not looked for.

    Args:
        codes: uint8 ``[..., count]``.
        bits: one of 1, 2, 3, 4, 8.

    Returns:
        uint8 ``[..., packed_size(count, bits)]``.
    """
    _check(codes, bits)
    packed = codes.new_empty((*codes.shape[:-1], packed_size(codes.shape[-1], bits)))
    if packed.numel():
        runs, count = codes.numel() // codes.shape[-1], codes.shape[-1]
        with on_device(codes.device):
            pack_kernel[_grid(packed)](codes.contiguous(), packed, runs, count, bits, BYTES_PER_PROGRAM, **LAUNCH)
    return packed


def unpack_triton(packed: Tensor, bits: int, count: int) -> Tensor:
    """Same codes as :func:`vericache_core.packing.unpack`: uint8 ``[..., count]``."""
    _check(packed, bits)
    if packed.shape[-1] != packed_size(count, bits):
        raise ValueError(f"{count} codes of {bits} bits take {packed_size(count, bits)} bytes, got {packed.shape[-1]}")
    codes = packed.new_empty((*packed.shape[:-1], count))
    if codes.numel():
        with on_device(packed.device):
            unpack_kernel[_grid(codes)](
                packed.contiguous(), codes, codes.numel() // count, count, bits, BYTES_PER_PROGRAM, **LAUNCH
            )
    return codes


def _grid(target: Tensor) -> tuple[int]:
    return (-(-target.numel() // BYTES_PER_PROGRAM),)


def _check(tensor: Tensor, bits: int) -> None:
    if bits not in SUPPORTED_BITS:
        raise ValueError(f"bits must be one of {SUPPORTED_BITS}, got {bits}")
    if tensor.dtype != torch.uint8:
        raise ValueError(f"codes must be uint8, got {tensor.dtype}")
