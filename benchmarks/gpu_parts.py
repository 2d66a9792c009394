"""What the parts of ``gpu.py`` share: shapes, random rows, compressed layers, and how differences are told."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vericache_core.cache.pages import PAGE, PagedRows
from vericache_core.coded import CodedLayer
from vericache_core.context import CompressContext
from vericache_core.kv import LayerDescriptor, PrefixView
from vericache_core.plugins.registry import default_registry

CODED = (
    ("kivi", {"bits": 2, "group": 16}),
    ("kivi", {"bits": 4, "group": 16}),
    ("turboquant", {"bits": 3}),
    ("turboquant", {"bits": 4, "values": "uniform"}),
)
"""Compressors with fused kernels; those that are not installed are left out."""


class DifferenceError(Exception):
    """A kernel or an engine gave something else than its reference."""


@dataclass(frozen=True)
class Shape:
    """Heads and widths of the layer that is measured."""

    heads: int
    kv_heads: int
    head_dim: int

    def layer(self, dtype: torch.dtype = torch.bfloat16) -> LayerDescriptor:
        width = self.head_dim
        return LayerDescriptor(0, "full", self.heads, self.kv_heads, width, width, dtype, width**-0.5)


def note(text: str) -> None:
    """Tell the user; standard output is for results."""
    print(text, file=sys.stderr, flush=True)


def require(close: bool, what: str) -> None:
    """Raise unless ``close``."""
    if not close:
        raise DifferenceError(what)


def random_rows(layer: LayerDescriptor, tokens: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Keys and values ``[kv_heads, tokens, width]``."""
    draw = torch.Generator(device).manual_seed(seed)
    shape = (layer.kv_heads, tokens, layer.head_dim)
    keys, values = (torch.randn(shape, generator=draw, device=device).to(layer.dtype) for _ in range(2))
    return keys, values


def filled(layer: LayerDescriptor, tokens: int, device: torch.device, seed: int) -> PagedRows:
    """Pages with ``tokens`` random rows and room for more."""
    pages = PagedRows(layer, device)
    pages.reserve(tokens + PAGE)
    pages.append(*random_rows(layer, tokens, device, seed))
    return pages


def step_rows(layer: LayerDescriptor, rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Query ``[rows, heads, head_dim]`` float32, scaled, and new key and value rows."""
    draw = torch.Generator(device).manual_seed(rows)
    query = torch.randn((rows, layer.heads, layer.head_dim), generator=draw, device=device) * layer.scaling
    keys, values = random_rows(layer, rows, device, rows)
    return query, keys.transpose(0, 1), values.transpose(0, 1)


def installed() -> list[tuple[str, dict[str, Any]]]:
    """``CODED`` without what is not installed."""
    names = set(default_registry().names())
    return [(name, dict(options)) for name, options in CODED if name in names]


def coded_layer(name: str, options: dict[str, Any], layer: LayerDescriptor, tokens: int, device: torch.device) -> CodedLayer:
    """Random rows, compressed."""
    keys, values = random_rows(layer, tokens, device, 7)
    compressor = default_registry().create(name, options)
    made = compressor.compress(PrefixView.from_tensors([layer], [keys], [values]), CompressContext()).layers[0]
    assert isinstance(made, CodedLayer)
    return made


def measure(run: Callable[[], object], repeats: int) -> float:
    """Median seconds of one call, on the device's own clock."""
    for _ in range(3):
        run()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times)
