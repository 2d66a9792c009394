"""The attention of one step: for every layer, each segment's rows against the cache of its phase."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from vericache_core.attention.online import AttentionState
from vericache_core.attention.paged import AttentionJob
from vericache_core.attention.sources import CodedPart, Turn
from vericache_core.blame import raised_at
from vericache_core.errors import CompressorFault, SwapError, VeriCacheError, describe
from vericache_core.kv import LayerDescriptor
from vericache_core.model.adapter import ModelAdapter, layer_index
from vericache_core.runtime.request import Request
from vericache_core.runtime.segments import Segment

AttendFunction = Callable[[Tensor, Tensor, Tensor, Sequence[AttentionJob], float], Tensor]
"""``(query, keys, values, jobs, scaling)``; see :func:`vericache_core.attention.paged.attend_reference`."""
Observer = Callable[[Segment[Request], int, Tensor, Tensor], None]
"""``(segment, layer, queries [count, heads, head_dim], keys [count, kv_heads, head_dim])``; the layer's pages are there."""
BeforeLayer = Callable[[int], None]
"""Called with the number of a layer before anything of its KV is asked for."""


class StepFault(Exception):
    """Something of one request failed inside a step; nothing of the step counts."""

    def __init__(self, request: Request, error: VeriCacheError) -> None:
        super().__init__(str(error))
        self.request, self.error = request, error


class TileAttention:
    """Answers the model's attention calls during one step.

    Args:
        layers: descriptors of the model.
        segments: who has which rows.
        attend: the fixed-block attention in use.
        observe: sees queries and keys of authoritative rows.
        before: called at each layer, ahead of all else.
    """

    def __init__(
        self,
        layers: Sequence[LayerDescriptor],
        segments: Sequence[Segment[Request]],
        attend: AttendFunction,
        observe: Observer,
        before: BeforeLayer = lambda _: None,
    ) -> None:
        self.layers, self.segments, self._attend, self._observe = layers, segments, attend, observe
        self._before = before
        self._bases: dict[tuple[int, int], npt.NDArray[np.int64]] = {}

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, facts: dict[str, Any]) -> Tensor:
        index = layer_index(module)
        layer = self.layers[index]
        self._before(index)
        jobs = [self._job(segment, layer) for segment in self.segments]
        output = self._attend(query, key, value, jobs, layer.scaling)
        for segment in self.segments:
            if segment.want.phase == "draft":
                continue
            mine = slice(segment.first, segment.first + segment.count)
            self._observe(segment, index, query[mine], key[mine])  # before the layer's pages go back to the ring
            self._finish(segment, index, key[mine], value[mine])
        return output.to(query.dtype)

    def _job(self, segment: Segment[Request], layer: LayerDescriptor) -> AttentionJob:
        request, want = segment.request, segment.want
        if want.phase == "draft":
            assert request.draft is not None
            pages, base, prefix = request.draft.layer(layer.index)
            guarded = None if prefix is None else _Guarded(prefix, request)
            return AttentionJob(segment.first, segment.count, pages, base, want.position, layer.sliding_window, guarded)
        try:
            pages = request.full.pages(layer.index)
        except SwapError as error:
            raise StepFault(request, error) from error
        at = (want.position, layer.kv_heads)
        if at not in self._bases:
            self._bases[at] = np.full(layer.kv_heads, want.position, dtype=np.int64)
        return AttentionJob(segment.first, segment.count, pages, self._bases[at], want.position, layer.sliding_window)

    def _finish(self, segment: Segment[Request], layer: int, key: Tensor, value: Tensor) -> None:
        request = segment.request
        try:
            request.full.wrote(layer, segment.count)
        except SwapError as error:
            raise StepFault(request, error) from error
        if request.draft is not None and layer in request.draft.compressed_layers():
            pages, base, _ = request.draft.layer(layer)
            pages.write(base, key.transpose(0, 1), value.transpose(0, 1))


def run_tile(
    adapter: ModelAdapter,
    segments: Sequence[Segment[Request]],
    attend: AttendFunction,
    observe: Observer,
    before: BeforeLayer = lambda _: None,
    *,
    graphs: bool = True,
) -> Tensor:
    """One model step over ``segments``; full KV that it touches must be open. Returns logits ``[rows, vocab]``.

    ``before`` may run another step meanwhile; ``graphs`` as in :meth:`ModelAdapter.step`.

    Raises:
        StepFault: something of one request failed; nothing of the step counts.
    """
    tokens = [token for segment in segments for token in segment.want.tokens[: segment.count]]
    positions = [segment.want.position + i for segment in segments for i in range(segment.count)]
    wanted = any(segment.want.phase != "prefill" or segment.count == len(segment.want.tokens) for segment in segments)
    tile = TileAttention(adapter.layers, segments, attend, observe, before)
    return adapter.step(tokens, positions, tile, logits=wanted, graphs=graphs)


class _Guarded:
    """A compressed prefix whose plugin code may raise: the fault is pinned on its request."""

    def __init__(self, prefix: Any, request: Request) -> None:
        self._prefix, self._request = prefix, request

    def attend(self, query: Tensor, state: AttentionState) -> None:
        shapes = _shapes(state)
        try:
            self._prefix.attend(query, state)
            if _shapes(state) != shapes:
                raise ValueError(f"attend() left a softmax state of {_shapes(state)}, expected {shapes}")  # noqa: TRY301
        except Exception as error:
            raise _fault(self._request, error) from error

    def parts(self) -> Sequence[CodedPart] | None:
        try:
            parts = self._prefix.parts()
            if parts is None:
                return None
            return [self._guarded(part) for part in parts]
        except Exception as error:
            raise _fault(self._request, error) from error

    def _guarded(self, part: CodedPart) -> CodedPart:
        return part if part.turn is None else replace(part, turn=_GuardedTurn(part.turn, self._request))


@dataclass(frozen=True)
class _GuardedTurn:
    """A plugin's rotation; requests whose rotations are equal share a call, and a fault is pinned on one of them."""

    turn: Turn
    request: Request = field(compare=False)

    def forward(self, query: Tensor) -> Tensor:
        return self._same_shape(self.turn.forward, query)

    def backward(self, acc: Tensor) -> Tensor:
        return self._same_shape(self.turn.backward, acc)

    def _same_shape(self, function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        try:
            turned = function(rows)
            if turned.shape != rows.shape or turned.dtype != rows.dtype:
                raise ValueError(f"a rotation of {tuple(rows.shape)} gave {tuple(turned.shape)} {turned.dtype}")  # noqa: TRY301
        except Exception as error:
            raise _fault(self.request, error) from error
        return turned


def _fault(request: Request, error: Exception) -> StepFault:
    cause = describe(error) + raised_at(error)
    return StepFault(request, CompressorFault("a compressor failed while its KV was attended to", cause=cause))


def _shapes(state: AttentionState) -> list[str]:
    """Shape and dtype of each part of a softmax state."""
    return [f"{tuple(part.shape)} {part.dtype}" for part in (state.top, state.total, state.acc)]
