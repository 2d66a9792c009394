"""Layers, identities and caches small enough for thousands of faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from vericache_core.kv import LayerDescriptor
from vericache_core.stores.identity import PrefixIdentity

IDENTITY = PrefixIdentity(
    weights="w" * 64,
    config="c" * 64,
    layout='[["full",2,1,4,4,"0x1.0p-1",null]]',
    dtype="float32",
    rotary='[["0x1.388p+13",4]]',
    tokenizer="t" * 64,
    numerics='{"attention":"reference"}',
)


def layers(count: int = 2, window: int | None = None, dtype: torch.dtype = torch.float32) -> tuple[LayerDescriptor, ...]:
    """Layers with one narrow KV head; with ``window`` every first one of a pair is a sliding one."""
    full = LayerDescriptor(
        index=0,
        kind="full",
        heads=2,
        kv_heads=1,
        head_dim=2,
        value_dim=3,
        dtype=dtype,
        scaling=0.5,
        rope_theta=1e4,
        rotary_dim=2,
    )
    return tuple(
        replace(full, index=i, kind="sliding", sliding_window=window) if window and i % 2 == 0 else replace(full, index=i)
        for i in range(count)
    )


def changed(field: str) -> PrefixIdentity:
    """``IDENTITY`` with one field changed."""
    other: dict[str, Any] = {field: 2 if field == "format" else "another"}
    return replace(IDENTITY, **other)


def tokens(count: int, seed: int = 0, vocab: int = 512) -> list[int]:
    drawn: list[int] = torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return drawn


def joined(parts: Sequence[Any]) -> bytes:
    return b"".join(bytes(part) for part in parts)
