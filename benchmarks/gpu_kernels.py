"""Every Triton kernel against its torch reference, and rows of the attention bit for bit in other company."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from gpu_parts import Shape, coded_layer, filled, installed, require, step_rows

from vericache_core.attention.online import AttentionState
from vericache_core.attention.paged import AttentionJob, attend_reference
from vericache_core.cache.pages import PAGE
from vericache_core.kv import LayerDescriptor
from vericache_core.packing import SUPPORTED_BITS, pack


def check_kernels(device: torch.device, shapes: Sequence[Shape]) -> int:
    """Compare every kernel with its reference; returns the number of comparisons."""
    from vericache_core.attention.triton_bits import pack_triton, unpack_triton

    done = 0
    for bits in SUPPORTED_BITS:
        codes = torch.randint(0, 1 << bits, (5, 1003), dtype=torch.uint8, device=device)
        require(torch.equal(pack_triton(codes, bits), pack(codes, bits)), f"pack of {bits} bits")
        require(torch.equal(unpack_triton(pack(codes, bits), bits, 1003), codes), f"unpack of {bits} bits")
        done += 2
    for shape in shapes:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            check_pages(shape.layer(dtype), device)
            done += 2
        for name, options in installed():
            check_codes(name, options, shape.layer(), device)
            done += 1
    return done


def check_pages(layer: LayerDescriptor, device: torch.device) -> None:
    """The fixed-block attention against its reference, and a row's bits alone against those in company."""
    from vericache_core.attention.triton_paged import CHUNK, attend_triton

    length, rows, label = CHUNK + PAGE - 3, 6, f"attention over pages, {layer.heads}/{layer.kv_heads} heads of {layer.head_dim}"
    query, keys, values = step_rows(layer, rows, device)
    answers = []
    for attend in (attend_triton, attend_reference):
        pages = filled(layer, length, device, 1)
        answers.append(attend(query, keys, values, [AttentionJob(0, rows, pages, pages.lengths, length)]))
    require(torch.allclose(answers[0], answers[1], atol=1e-4, rtol=1e-4), f"{label} {layer.dtype}")
    pages = filled(layer, length, device, 1)
    for row in range(rows):
        one = [torch.zeros_like(part) for part in (query, keys, values)]
        for target, part in zip(one, (query, keys, values), strict=True):
            target[rows - 1] = part[row]
        job = AttentionJob(rows - 1, 1, pages, pages.lengths, length + row)
        alone = attend_triton(one[0], one[1], one[2], [job])[rows - 1]
        pages.grow_lengths(1)
        require(torch.equal(alone, answers[0][row]), f"bits of row {row}, {label} {layer.dtype}")


def check_codes(name: str, options: dict[str, Any], layer: LayerDescriptor, device: torch.device) -> None:
    """Fused attention against decoding and folding."""
    from vericache_core.attention import fused

    held = coded_layer(name, options, layer, 700, device)
    query = step_rows(layer, 1, device)[0].transpose(0, 1).contiguous()
    expected, found = (AttentionState.fresh(layer.heads, 1, layer.head_dim, device) for _ in range(2))
    with mock.patch.object(fused, "runs_on", return_value=False):
        held.attend(query, expected)
    with mock.patch.object(fused, "runs_on", return_value=True):
        held.attend(query, found)
    require(torch.allclose(found.output(), expected.output(), atol=1e-3, rtol=1e-3), f"attention over {name} {options}")
