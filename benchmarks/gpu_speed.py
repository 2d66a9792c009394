"""One decode step of one layer over a long context, by each kernel, beside torch's SDPA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from gpu_parts import Shape, coded_layer, filled, installed, measure, step_rows

from vericache_core.attention.online import AttentionState
from vericache_core.attention.paged import AttentionJob
from vericache_core.coded import CodedLayer
from vericache_core.kv import LayerDescriptor


@dataclass(frozen=True)
class Row:
    """One measurement: ``seconds`` is the median of one decode step of one layer."""

    kernel: str
    context: int
    batch: int
    bytes: int
    seconds: float
    bytes_per_second: float
    times_sdpa: float


def by_sdpa(layer: LayerDescriptor, context: int, batch: int, device: torch.device) -> Callable[[], object]:
    """One query row a request by torch itself, over the full KV."""
    shape = (batch, layer.kv_heads, context, layer.head_dim)
    keys, values = (torch.randn(shape, device=device, dtype=layer.dtype) for _ in range(2))
    query = torch.randn(batch, layer.heads, 1, layer.head_dim, device=device, dtype=layer.dtype)
    return lambda: torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)


def by_pages(layer: LayerDescriptor, context: int, batch: int, device: torch.device) -> Callable[[], object]:
    """The fixed-block attention of one row a request, storing included."""
    from vericache_core.attention.triton_paged import attend_triton

    query, keys, values = step_rows(layer, batch, device)
    caches = [filled(layer, context - 1, device, seed) for seed in range(batch)]
    jobs = [AttentionJob(i, 1, pages, pages.lengths, context - 1) for i, pages in enumerate(caches)]
    return lambda: attend_triton(query, keys, values, jobs)


def by_codes(layer: LayerDescriptor, held: Sequence[CodedLayer], device: torch.device) -> Callable[[], object]:
    """One row of each request over its codes."""
    query = step_rows(layer, 1, device)[0].transpose(0, 1).contiguous()

    def run() -> None:
        for one in held:
            one.attend(query, AttentionState.fresh(layer.heads, 1, layer.head_dim, device))

    return run


def speed(device: torch.device, shape: Shape, context: int, batch: int, repeats: int) -> list[Row]:
    """One decode step of one layer for ``batch`` requests of ``context`` tokens, by each kernel."""
    layer = shape.layer()
    full = batch * context * layer.token_bytes
    base = measure(by_sdpa(layer, context, batch, device), repeats)
    rows = [Row("sdpa, full bf16", context, batch, full, base, full / base, 1.0)]

    def add(kernel: str, size: int, run: Callable[[], object]) -> None:
        seconds = measure(run, repeats)
        rows.append(Row(kernel, context, batch, size, seconds, size / seconds, base / seconds))

    add("pages, full bf16", full, by_pages(layer, context, batch, device))
    add("pages, keep 0.25", full // 4, by_pages(layer, context // 4, batch, device))
    for name, options in installed():
        held = [coded_layer(name, options, layer, context, device) for _ in range(batch)]
        label = " ".join([name, *(f"{key}={value}" for key, value in options.items())])
        add(label, sum(one.nbytes for one in held), by_codes(layer, held, device))
    return rows


def table(rows: Sequence[Row]) -> str:
    """The measurements for people."""
    lines = [f"{'KERNEL':<32}{'CONTEXT':>9}{'BATCH':>7}{'MiB':>10}{'MICROSECONDS':>14}{'GB/s':>9}{'x SDPA':>8}"]
    lines += [
        f"{row.kernel:<32}{row.context:>9}{row.batch:>7}{row.bytes / 2**20:>10.1f}{row.seconds * 1e6:>14.1f}"
        f"{row.bytes_per_second / 1e9:>9.0f}{row.times_sdpa:>8.2f}"
        for row in rows
    ]
    return "\n".join(lines)
