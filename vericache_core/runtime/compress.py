"""From full KV to draft KV: what prefill shows a compressor, the compression itself, and folding the tail in."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from vericache_core.cache.draft import DraftKV
from vericache_core.compressor import Compressor, TokenDropCompressor
from vericache_core.context import CompressContext, Needs, ScoreObserver
from vericache_core.errors import CompressorFault
from vericache_core.kv import CompressedKV, PrefixView
from vericache_core.model.adapter import ModelAdapter
from vericache_core.runtime.observations import Observations
from vericache_core.runtime.request import Request, Want
from vericache_core.runtime.segments import Segment
from vericache_core.runtime.tile import Observer

Forward = Callable[[Sequence[Segment[Request]], Observer], object]
"""Runs one model step over segments, showing queries and keys of its authoritative rows."""


class PluginFailure(Exception):
    """Something failed while a compressor was called in ``where``; the draft KV of the request cannot be relied on."""

    def __init__(self, where: str, error: Exception) -> None:
        super().__init__(f"{where}: {error}")
        self.where, self.error = where, error


class Compression:
    """Keeps the draft KV of requests up to date with their full KV.

    Args:
        adapter: the model.
        fold: tail length at which ``Compressor.extend`` is called; 0 never.
        encode: text -> token ids, for compressors that need it.
        forward: runs scoring passes.
        made: is told of every prefix that was compressed, but not of those that were provided.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        fold: int,
        encode: Callable[[str], list[int]] | None,
        forward: Forward,
        made: Callable[[Request, CompressedKV], None] | None = None,
    ) -> None:
        self.adapter, self._fold, self._encode, self._forward, self._made = adapter, fold, encode, forward, made
        self._observations: dict[int, Observations] = {}
        self._provided: dict[int, CompressedKV] = {}

    @property
    def observed(self) -> Sequence[int]:
        """Numbers of requests whose prefix is still to be compressed."""
        return tuple(self._observations)

    def expect(self, request: Request) -> None:
        """Begin to record what the compressor of ``request``, if it has one, asks of the prefill."""
        self._provided.pop(request.number, None)
        if request.compressor is not None:
            self._observations[request.number] = Observations(request.compressor.needs, request.compress_at)

    def provide(self, request: Request, compressed: CompressedKV) -> None:
        """Give the compressed KV of the prefix of a request that is expected; nothing need be seen of its prefill then."""
        self._observations[request.number] = Observations(Needs(), request.compress_at)
        self._provided[request.number] = compressed

    def needs(self, request: Request) -> Needs:
        """What the coming prefill of ``request`` is to show its compressor; nothing, if it has none."""
        seen = self._observations.get(request.number)
        return Needs() if seen is None else seen.needs

    def forget(self, number: int) -> None:
        """Drop what was recorded for a request; unknown numbers are no error."""
        self._observations.pop(number, None)
        self._provided.pop(number, None)

    def observe(self, segment: Segment[Request], layer: int, queries: Tensor, keys: Tensor) -> None:
        """See a block of authoritative rows: ``queries [count, heads, head_dim]``, ``keys [count, kv_heads, head_dim]``.

        Called while the step has the pages of ``layer`` in hand: earlier keys are read there, not swapped in once more.
        """
        seen = self._observations.get(segment.request.number)
        if seen is None or segment.request.draft is not None:
            return
        everything = None
        if seen.needs.attention_mass and self.adapter.layers[layer].sliding_window is None:  # windows let old keys go
            past = segment.request.full.pages(layer).rows(0, segment.want.position)[0]
            everything = torch.cat([past, keys.transpose(0, 1)], 1)
        seen.add(self.adapter.layers[layer], segment.want.position, queries, everything)

    def update(self, request: Request) -> None:
        """Compress the prefix when all of it is there, and later fold the tail in when it is long.

        Raises:
            PluginFailure: whatever went wrong in it.
        """
        if request.draft is not None:
            self._fold_tail(request)
        elif request.compressor is not None and request.full.tokens >= request.compress_at:
            self._compress(request)

    def _compress(self, request: Request) -> None:
        compressor, seen = request.compressor, self._observations.pop(request.number)
        assert compressor is not None
        provided = self._provided.pop(request.number, None)
        started = time.perf_counter()
        # What was asked when the request came in: a compressor that changes its mind must not move layers about.
        supported = [layer.index for layer in self.adapter.layers if layer.index not in request.full.pinned]
        try:
            compressed = provided
            if compressed is None:
                compressed = compressor.compress(self._prefix(request, supported), self._context(request, seen))
            request.metrics.compressed_kv_bytes = compressed.nbytes
            request.draft = DraftKV.build(request.full, compressed, supported)
            request.swapped_before = request.full.moved_bytes
        except Exception as error:  # whatever a plugin raises costs speed, never tokens
            raise PluginFailure("compress", error) from error
        finally:
            request.metrics.add_seconds("load" if provided else "compress", time.perf_counter() - started)
        if provided is None and self._made is not None:
            self._made(request, compressed)
        per_token = sum(self.adapter.layers[index].token_bytes for index in supported)
        request.metrics.compressed_from_bytes = per_token * request.full.tokens

    def _fold_tail(self, request: Request) -> None:
        draft, compressor = request.draft, request.compressor
        assert draft is not None
        assert compressor is not None
        if not self._fold or draft.tail < self._fold or request.drafts:
            return
        if not draft.has_codes and getattr(type(compressor), "extend", None) is TokenDropCompressor.extend:
            return  # the base keeps every tail row as it is, which is what the pages hold already
        started = time.perf_counter()
        try:
            extended = compressor.extend(draft.current(), draft.tail_view(), CompressContext(seed=request.params.seed))
            if not draft.fold(extended):
                request.draft = DraftKV.build(request.full, extended, draft.compressed_layers())
        except Exception as error:  # as in _compress
            raise PluginFailure("extend", error) from error
        finally:
            request.metrics.add_seconds("compress", time.perf_counter() - started)

    def _prefix(self, request: Request, supported: Sequence[int]) -> PrefixView:
        def read(layer: int) -> tuple[Tensor, Tensor]:
            if layer not in supported:
                raise CompressorFault(f"layer {layer} stays uncompressed and cannot be read")
            return request.full.read(layer, 0, request.full.tokens)

        return PrefixView(self.adapter.layers, request.tokens[: request.full.tokens], read)

    def _context(self, request: Request, seen: Observations) -> CompressContext:
        return CompressContext(
            seed=request.params.seed,
            protected=request.protected,
            query_reader=seen.queries if seen.needs.queries else None,
            mass_reader=seen.mass if seen.needs.attention_mass else None,
            score_runner=(lambda ids, observer: self._score(request, ids, observer)) if seen.needs.scoring else None,
            encoder=self._encode,
            model_reader=(lambda: self.adapter.model) if seen.needs.model else None,
        )

    def _score(self, request: Request, token_ids: Sequence[int], observer: ScoreObserver) -> None:
        """Run ``token_ids`` after the prefix, show their queries and keys, take their rows back."""

        def show(_segment: Segment[Request], layer: int, queries: Tensor, keys: Tensor) -> None:
            observer(layer, queries.transpose(0, 1).clone(), keys.transpose(0, 1).clone())

        before = request.full.tokens
        try:
            for start in range(0, len(token_ids), self.adapter.most_rows):
                block = tuple(token_ids[start : start + self.adapter.most_rows])
                want = Want("prefill", (*block, 0), request.full.tokens)  # one token more than runs: no logits wanted
                self._forward([Segment(request, want, 0, len(block))], show)
                request.full.advance(len(block), keep_window=True)
        finally:
            request.full.rollback(request.full.tokens - before)


def uncompressed_layers(adapter: ModelAdapter, compressor: Compressor | None) -> set[int]:
    """Layers that stay exact on the device: sliding windows, and those the compressor declines."""
    return {
        layer.index
        for layer in adapter.layers
        if layer.kind == "sliding" or (compressor is not None and not compressor.supports(layer))
    }
