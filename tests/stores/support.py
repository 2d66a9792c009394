"""Layers, identities and caches small enough for thousands of faults."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vericache_core.cache.full import FullKV
from vericache_core.cache.ring import SwapRing
from vericache_core.kv import LayerDescriptor
from vericache_core.stores.disk import DiskBlobs
from vericache_core.stores.identity import PrefixIdentity
from vericache_core.stores.prefix import PrefixStore

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


CPU = torch.device("cpu")
CHUNK = 128
Rows = tuple[torch.Tensor, torch.Tensor]


class Model:
    """Rows as a function of the tokens before them, as a model's are, without a model."""

    def __init__(self, described: Sequence[LayerDescriptor], seed: int = 0) -> None:
        self.layers, self.seed = tuple(described), seed
        self._known: dict[tuple[int, tuple[int, ...]], Rows] = {}

    def rows(self, layer: int, ids: Sequence[int]) -> Rows:
        key = (layer, tuple(ids))
        if key not in self._known:
            self._known[key] = self._rows(layer, ids)
        return self._known[key]

    def _rows(self, layer: int, ids: Sequence[int]) -> Rows:
        state = torch.tensor(list(itertools.accumulate(ids, lambda a, b: (a * 31 + b) % 99991)))
        state = (state * 7 + layer * 1009 + self.seed * 31337)[None, :, None]
        about = self.layers[layer]
        return tuple(  # type: ignore[return-value]
            torch.sin(state * (torch.arange(width) + 1.0)).expand(about.kv_heads, -1, -1).to(about.dtype)
            for width in (about.head_dim, about.value_dim)
        )

    def cache(self, tier: str = "device") -> FullKV:
        return FullKV(self.layers, CPU, tier, {layer.index for layer in self.layers if layer.sliding_window}, SwapRing(2, CPU))

    def prefill(self, full: FullKV, ids: Sequence[int], store: PrefixStore | None = None, step: int = 50) -> None:
        """Compute the rows that are missing, and save each chunk when it is full."""
        every = [self.rows(layer.index, ids) for layer in self.layers]
        while full.tokens < len(ids):
            count = min(step, len(ids) - full.tokens)
            full.open(count)
            for layer in self.layers:
                keys, values = (part[:, full.tokens : full.tokens + count] for part in every[layer.index])
                full.pages(layer.index).write(np.full(layer.kv_heads, full.tokens, dtype=np.int64), keys, values)
                full.wrote(layer.index, count)
            full.close_step()
            before = full.tokens
            if store is not None:
                for number in range(before // CHUNK, (before + count) // CHUNK):
                    store.put(store.capture(ids, full, number))
            full.advance(count)

    def wrong_rows(self, full: FullKV, ids: Sequence[int]) -> int:
        """Rows that the next token sees and that are not those of a prefill."""
        wrong = 0
        for layer in self.layers:
            first = 0 if layer.sliding_window is None else max(0, full.tokens - layer.sliding_window + 1)
            expected = self.rows(layer.index, ids[: full.tokens])
            for ours, theirs in zip(full.read(layer.index, first, full.tokens), expected, strict=True):
                wrong += int((ours != theirs[:, first:]).any(-1).sum())
        full.check_integrity()
        return wrong


def make_store(model: Model, folder: Path, identity: PrefixIdentity = IDENTITY, **settings: Any) -> PrefixStore:
    return PrefixStore(DiskBlobs(folder, durable=False), identity, model.layers, CHUNK, **settings)


def live_on(model: Model, store: PrefixStore, prompts: Iterable[list[int]]) -> tuple[int, list[str]]:
    """Load, check and complete the KV of each prompt: how often anything was found, and what was wrong."""
    hits, failures = 0, []
    for ids in prompts:
        full = model.cache()
        loaded = store.load(ids, full)
        hits += loaded.tokens > 0
        if loaded.faults or model.wrong_rows(full, ids):
            failures.append(str(loaded))
        model.prefill(full, ids, store)
    return hits, failures


MODELS = {"full": layers(2), "window 8": layers(2, 8), "window 200": layers(2, 200), "bf16": layers(3, dtype=torch.bfloat16)}
