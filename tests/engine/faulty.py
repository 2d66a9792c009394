"""Compressors and disks that misbehave in one named way."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from vericache_core.attention.online import AttentionState
from vericache_core.builtin import IdentityCompressor, IdentityOptions
from vericache_core.context import CompressContext, Needs
from vericache_core.index_map import HeadMap
from vericache_core.kv import CompressedKV, CompressedLayer, LayerDescriptor, PrefixView
from vericache_core.plugins.spec import API_VERSION, CompressorSpec


def spec(name: str, factory: Callable[[Any], Any], options: Any = IdentityOptions) -> CompressorSpec:
    return CompressorSpec(name=name, factory=factory, options=options, kind="token-drop", api_version=API_VERSION)


class Faulty(IdentityCompressor):
    """The identity compressor with one method replaced; ``calls`` counts over all requests."""

    name = "faulty"

    def __init__(self, options: Any, fault: str, state: dict[str, Any]) -> None:
        super().__init__(options)
        self.fault, self.state = fault, state

    @property
    def needs(self) -> Needs:
        if self.fault == "needs":
            raise RuntimeError("needs broke")
        return Needs(queries=4, attention_mass=True, scoring=True)

    def supports(self, layer: LayerDescriptor) -> bool:
        if self.fault == "supports":
            raise RuntimeError("supports broke")
        return super().supports(layer)

    def compress(self, prefix: PrefixView, context: CompressContext) -> CompressedKV:
        raised: dict[str, Exception] = {"compress": RuntimeError("compress broke"), "exit": SystemError("compress broke badly")}
        if self.fault in raised:
            raise raised[self.fault]
        if self.fault == "none":
            return cast("CompressedKV", None)
        if self.fault == "observer":
            context.score([1, 2, 3], lambda layer, queries, keys: _raise())
        made = super().compress(prefix, context)
        if self.fault == "mutate":
            for layer in prefix.layers:
                for part in (*prefix.rows(layer.index), context.queries(layer.index), context.attention_mass(layer.index)):
                    part.fill_(float("nan"))
        layers = self._spoiled(list(made.layers), prefix.tokens)
        tokens = prefix.tokens - (self.fault == "tokens")
        return CompressedKV(self.name, {}, tokens, made.descriptors, tuple(layers))

    def _spoiled(self, layers: list[CompressedLayer | None], tokens: int) -> list[CompressedLayer | None]:
        first = next(i for i, layer in enumerate(layers) if layer is not None)
        held = layers[first]
        assert held is not None
        heads, everything = held.surviving.kv_heads, torch.arange(tokens)
        if self.fault == "too few layers":
            return layers[:-1]
        if self.fault == "negative":
            held.surviving.counts = (-1,) * heads
        if self.fault == "keep":
            self.state["kept"] = [layer for layer in layers if layer is not None]
        maps = {
            "map": HeadMap.everything(tokens + 1, heads),
            "empty head": HeadMap([everything[:0], everything], tokens),
        }
        held.surviving = maps.get(self.fault, held.surviving)
        replaced: dict[str, CompressedLayer | None] = {
            "missing layer": None,
            "heads": _Strange(HeadMap.everything(tokens, heads + 5), "nothing"),
            **{fault: _Strange(HeadMap.everything(tokens, heads), fault) for fault in _Strange.faults},
        }
        layers[first] = replaced.get(self.fault, held)
        return layers

    def extend(self, compressed: CompressedKV, rows: PrefixView, context: CompressContext) -> CompressedKV:
        if self.fault == "extend":
            raise RuntimeError("extend broke")
        made = super().extend(compressed, rows, context)
        if self.fault == "extend mutates":
            for part in compressed.layers:
                for tensor in part.tensors().values() if part is not None else ():
                    tensor.fill_(float("nan"))
            for layer in rows.layers:
                if compressed.layers[layer.index] is not None:
                    rows.keys(layer.index).fill_(float("nan"))
        if self.fault == "extend forgets":
            return compressed
        return made


def _raise() -> None:
    raise ZeroDivisionError("observer broke")


class _Strange(CompressedLayer):
    """A compressed layer whose attention goes wrong."""

    faults = ("attend", "late attend", "parts", "wrong shape", "nan", "mutate query")

    def __init__(self, surviving: HeadMap, fault: str) -> None:
        self.surviving, self.fault, self.calls = surviving, fault, 0

    def attend(self, query: torch.Tensor, state: AttentionState) -> None:
        self.calls += 1
        if self.fault in {"attend", "parts"} or (self.fault == "late attend" and self.calls == 9):
            raise RuntimeError("attend broke")
        if self.fault == "wrong shape":
            state.acc = state.acc[:, :, :1]
        if self.fault == "nan":
            state.acc.fill_(float("nan"))
            state.top.fill_(float("nan"))
        if self.fault == "mutate query":
            query.fill_(float("inf"))

    def parts(self) -> None:
        if self.fault == "parts":
            raise RuntimeError("parts broke")

    def tensors(self) -> dict[str, torch.Tensor]:
        return {}


@contextmanager
def failing_disk(kind: str, calls: set[int]) -> Iterator[list[int]]:
    """Let the given calls (counted from 0) of ``pwrite`` or ``preadv`` fail; yields the calls that were made.

    ``kind``: ``ENOSPC``, ``EDQUOT`` and ``short write`` strike writes, ``EIO`` and ``short read`` strike reads.
    """
    reading = kind in {"EIO", "short read"}
    name = "preadv" if reading else "pwrite"
    original: Any = getattr(os, name)
    made: list[int] = []

    def call(file: int, data: Any, offset: int) -> int:
        made.append(len(made))
        if made[-1] not in calls:
            done: int = original(file, data, offset)
            return done
        if kind.startswith("short"):
            if reading:
                data[0][:] = bytes(b"\xff" * len(data[0]))
            else:
                original(file, bytes(data)[: len(data) // 2], offset)
            return len(data[0] if reading else data) // 2
        raise OSError(getattr(errno, kind), os.strerror(getattr(errno, kind)))

    setattr(os, name, call)
    try:
        yield made
    finally:
        setattr(os, name, original)
