"""Requests that share one prefill.

The rows of a token are a pure function of the tokens before it, so rows computed once may be copied into any
request with the same prompt: it then does what it would have done after a prefill of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from vericache_core.bench.prompts import BenchPrompt
from vericache_core.cache.full import FullKV
from vericache_core.compressor import Compressor
from vericache_core.context import CompressContext, Needs
from vericache_core.engine import Engine
from vericache_core.errors import ConfigError
from vericache_core.kv import CompressedKV, LayerDescriptor, PrefixView, StoredLayer
from vericache_core.runtime.request import Request
from vericache_core.runtime.sampling_params import SamplingParams


class Memo:
    """A compressor that remembers what it made of the prefix it saw first, and does all else as ``inner`` does."""

    def __init__(self, inner: Compressor) -> None:
        self.inner = inner
        self.made: CompressedKV | None = None

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def needs(self) -> Needs:
        return self.inner.needs

    def supports(self, layer: LayerDescriptor) -> bool:
        return self.inner.supports(layer)

    def compress(self, prefix: PrefixView, context: CompressContext) -> CompressedKV:
        self.made = self.inner.compress(prefix, context)
        return self.made

    def extend(self, compressed: CompressedKV, rows: PrefixView, context: CompressContext) -> CompressedKV:
        return self.inner.extend(compressed, rows, context)

    def rollback(self, compressed: CompressedKV, tokens: int, prefix: PrefixView | None = None) -> CompressedKV:
        return self.inner.rollback(compressed, tokens, prefix)

    def restore(
        self, tokens: int, layers: Sequence[StoredLayer | None], descriptors: Sequence[LayerDescriptor]
    ) -> CompressedKV:
        return self.inner.restore(tokens, layers, descriptors)


Tell = Callable[[str], None]
"""Told where a run stands, after every step."""


class KeptKV(FullKV):
    """Full KV that outlives its request, sliding windows complete, since rows are copied from it; :meth:`free` ends it."""

    def advance(self, rows: int, keep_window: bool = False) -> None:
        super().advance(rows, keep_window=True)

    def close(self) -> None:
        self.close_step()

    def free(self) -> None:
        """Give the rows back."""
        super().close()


def new_request(engine: Engine, prompt: BenchPrompt, tokens: int, compressor: Compressor | None, full: FullKV) -> Request:
    """A greedy request that records its logits.

    Raises:
        ConfigError: the engine chooses windows, so compressors would not be compared at one.
    """
    if engine.config.window == "auto":
        raise ConfigError("a table of compressors compares them at one window", hint="give window a number")
    request = engine.builder.make_request(prompt.token_ids, SamplingParams(max_new_tokens=tokens), full, compressor)
    request.protected, request.logits = prompt.protected, []
    request.metrics.compressor = None if compressor is None else compressor.name
    return request


def empty_kv(engine: Engine, compressor: Compressor | None, tokens: int, kind: type[FullKV] = FullKV) -> FullKV:
    """Full KV as the engine would make it, on the device where it is decoded plainly."""
    full = engine.builder.make_full_kv(compressor, "device" if compressor is None else engine.config.full_kv, kind)
    full.make_room(tokens)
    return full


@torch.inference_mode()  # as a step writes them
def copy_prefix(source: FullKV, target: FullKV, tokens: int) -> None:
    """Let ``target``, which is empty, begin with the first ``tokens`` rows of ``source``."""
    if tokens <= 0:
        return
    target.open(tokens)
    try:
        for layer in target.layers:
            pages = target.pages(layer.index)
            pages.write(np.zeros(layer.kv_heads, dtype=np.int64), *source.read(layer.index, 0, tokens))
            target.wrote(layer.index, tokens)
    finally:
        target.close_step()
    target.advance(tokens)


def run_all(engine: Engine, requests: Sequence[Request], tell: Tell) -> None:
    """Run requests side by side to their ends."""
    try:
        for request in requests:
            engine.loop.add(request)
        while any(not request.finished for request in requests):
            engine.loop.step()
            tell(_standing(requests))
    finally:
        for request in requests:
            engine.loop.remove(request)


def _standing(requests: Sequence[Request]) -> str:
    prompt, done = (
        sum(count) for count in zip(*((r.prompt_tokens, min(r.full.tokens, r.prompt_tokens)) for r in requests), strict=True)
    )
    if done < prompt:
        return f"{done} of {prompt} prompt tokens"
    new, drafted = sum(len(r.generated) for r in requests), sum(len(r.drafts) for r in requests)
    return f"{new} tokens decoded" + (f", {drafted} drafted" if drafted else "")


def generated_rows(full: FullKV, start: int) -> list[tuple[Tensor, Tensor]]:
    """Per layer the rows from ``start`` on: ``(keys [kv_heads, n, head_dim], values [kv_heads, n, value_dim])``."""
    return [full.read(layer.index, start, full.tokens) for layer in full.layers]
