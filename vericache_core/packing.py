"""Codes of 1, 2, 3, 4 or 8 bits packed into bytes, least significant bits first.

A group of 8 codes always fills ``bits`` whole bytes, read as one little-endian integer whose lowest bits
are the first code. For 2 and 4 bits this is the byte order of KIVI's int32 words (LSB first), for 3 bits
"8 codes in 3 little-endian bytes".
"""

from __future__ import annotations

import torch
from torch import Tensor

SUPPORTED_BITS = (1, 2, 3, 4, 8)


def packed_size(count: int, bits: int) -> int:
    """Bytes that ``count`` codes of ``bits`` bits take: rounded up to a whole byte."""
    return (count * bits + 7) // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack the last axis.

    Args:
        codes: uint8 ``[..., count]``, every value below ``2 ** bits``.
        bits: one of 1, 2, 3, 4, 8.

    Returns:
        uint8 ``[..., packed_size(count, bits)]``.

    Raises:
        ValueError: unsupported ``bits``, a dtype other than uint8, or a code out of range.
    """
    _check(codes, bits)
    if codes.numel() and int(codes.max()) >= 1 << bits:
        raise ValueError(f"code {int(codes.max())} does not fit in {bits} bits")
    if bits == 8:
        return codes.clone()
    count = codes.shape[-1]
    if 8 % bits == 0:  # a byte holds whole codes, so bytes can be built on their own
        return (_split(codes, 8 // bits) << _shifts(bits, codes.device)).sum(-1, dtype=torch.uint8)
    lanes = _split(codes, 8).to(torch.int32)
    words = (lanes << (torch.arange(8, dtype=torch.int32, device=codes.device) * bits)).sum(-1, dtype=torch.int32)
    shifts = torch.arange(bits, dtype=torch.int32, device=codes.device) * 8
    packed = ((words.unsqueeze(-1) >> shifts) & 0xFF).to(torch.uint8).flatten(-2)
    return packed[..., : packed_size(count, bits)].contiguous()


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Inverse of :func:`pack`: uint8 ``[..., count]``.

    Raises:
        ValueError: unsupported ``bits``, or a last axis that is not ``packed_size(count, bits)`` long.
    """
    _check(packed, bits)
    if packed.shape[-1] != packed_size(count, bits):
        raise ValueError(f"{count} codes of {bits} bits take {packed_size(count, bits)} bytes, got {packed.shape[-1]}")
    if bits == 8:
        return packed.clone()
    mask = (1 << bits) - 1
    if 8 % bits == 0:
        words, lanes = packed, 8 // bits
    else:
        groups, lanes = _split(packed, bits).to(torch.int32), 8
        words = groups[..., 0]
        for byte in range(1, bits):
            words = words | (groups[..., byte] << 8 * byte)
    # One shift by a number for each lane: shifting a last axis of so few numbers takes four times as long.
    codes = torch.stack([((words >> lane * bits) & mask).to(torch.uint8) for lane in range(lanes)], -1)
    return codes.flatten(-2)[..., :count].contiguous()


def _split(tensor: Tensor, size: int) -> Tensor:
    """``[..., count]`` -> ``[..., ceil(count / size), size]``, filled up with zeros."""
    padded = torch.nn.functional.pad(tensor, (0, -tensor.shape[-1] % size))
    return padded.reshape(*tensor.shape[:-1], padded.shape[-1] // size, size)


def _shifts(bits: int, device: torch.device) -> Tensor:
    """uint8 ``[8 // bits]``: where each code of a byte starts, lowest first."""
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=device)


def _check(codes: Tensor, bits: int) -> None:
    if bits not in SUPPORTED_BITS:
        raise ValueError(f"bits must be one of {SUPPORTED_BITS}, got {bits}")
    if codes.dtype != torch.uint8:
        raise ValueError(f"codes must be uint8, got {codes.dtype}")
