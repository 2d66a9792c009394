"""``generate`` of transformers as a system: default cache, offloaded cache, prompt lookup.

Prompts are prefilled once, in chunks, into a cache that every run gets a copy of, so a run times decoding alone.
Attention is ``sdpa``, the weights are those of our engine.
"""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from vericache_core.bench.throughput.engines import Shop
from vericache_core.bench.throughput.measured import Measured, Unavailable
from vericache_core.bench.throughput.workloads import Workload

Variant = Literal["default", "offloaded", "lookup"]
CHUNK = 512
"""Prompt tokens in a forward of the prefill: memory for activations stays small."""
LOOKUP_TOKENS = 10
"""``prompt_lookup_num_tokens``, the value that the documentation of transformers uses."""


@dataclass(frozen=True)
class _Batch:
    """Left-padded prompts and the cache of all of their tokens but the last: ``ids``, ``mask`` are ``[batch, tokens]``."""

    ids: Tensor
    mask: Tensor
    cache: Any


class HuggingFaceSystem:
    """See the module docstring. Prompt lookup takes one request at a time, the others a left-padded batch."""

    lossless = False
    """Its tokens are those of other kernels: near-ties may fall the other way."""

    def __init__(self, shop: Shop, name: str, variant: Variant) -> None:
        self._shop, self.name, self._variant = shop, name, variant
        self._batches: list[_Batch] = []
        self._prefill_seconds = 0.0

    def prepare(self, workload: Workload) -> None:
        model = self._shop.model
        if workload.budget_share is not None:
            raise Unavailable("knows no cap on device KV")
        if self._variant == "offloaded" and next(model.parameters()).device.type == "cpu":
            raise Unavailable("offloads from an accelerator to the CPU, and there is none")
        prompts = [list(prompt.token_ids) for prompt in workload.prompts]
        groups = [[ids] for ids in prompts] if self._variant == "lookup" else [prompts]
        started = time.perf_counter()
        with _own_attention(model):
            for number, group in enumerate(groups):
                self._shop.tell(f"{workload.name}: {self.name}: prefill {number + 1} of {len(groups)}")
                self._batches.append(self._prefill(group))
        self._prefill_seconds = time.perf_counter() - started

    @torch.inference_mode()
    def _prefill(self, prompts: Sequence[list[int]]) -> _Batch:
        model, cache = self._shop.model, self._cache()
        device, longest = next(model.parameters()).device, max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(one)) + one for one in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts], device=device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        for first in range(0, longest - 1, CHUNK):
            last = min(first + CHUNK, longest - 1)
            model(
                input_ids=ids[:, first:last],
                attention_mask=mask[:, :last],
                position_ids=positions[:, first:last],
                use_cache=True,
                logits_to_keep=1,
                **_cache_argument(model, cache),
            )
        return _Batch(ids, mask, cache)

    def _cache(self) -> Any:
        from transformers import DynamicCache

        text = self._shop.model.config.get_text_config()
        return DynamicCache(config=text, offloading=True) if self._variant == "offloaded" else DynamicCache(config=text)

    @torch.inference_mode()
    def run(self, workload: Workload) -> Measured:
        import copy

        from transformers import GenerationConfig

        model, new = self._shop.model, workload.new_tokens
        lookup = {"prompt_lookup_num_tokens": LOOKUP_TOKENS} if self._variant == "lookup" else {}
        # An id outside of the vocabulary ends a sequence, so every system writes the same number of tokens.
        never = int(model.get_output_embeddings().weight.shape[0])
        config = GenerationConfig(
            do_sample=False, max_new_tokens=new, pad_token_id=0, eos_token_id=never, use_cache=True, **lookup
        )
        tokens: list[list[int]] = []
        seconds, held, steps = 0.0, 0, 0
        with _own_attention(model), _no_defaults(model):
            for batch in self._batches:
                cache = copy.deepcopy(batch.cache)
                started = time.perf_counter()
                with _cached_once(model) as count:
                    output = model.generate(
                        input_ids=batch.ids,
                        attention_mask=batch.mask,
                        generation_config=config,
                        **_cache_argument(model, cache),
                    )
                seconds, steps = seconds + time.perf_counter() - started, steps + next(count)
                tokens += [row[:new] for row in output[:, batch.ids.shape[1] :].tolist()]
                held = max(held, _nbytes(cache))
        return Measured(
            tokens=tokens,
            decoded=sum(map(len, tokens)),
            decode_seconds=seconds,
            prefill_seconds=self._prefill_seconds,
            peak_device_kv_bytes=held,
            steps=steps,
            notes=["one request at a time"] if self._variant == "lookup" else ["one left-padded batch"],
        )

    def release(self) -> None:
        self._batches.clear()

    def close(self) -> None:
        self.release()


@contextmanager
def _own_attention(model: Any) -> Iterator[None]:
    """The model with its usual attention; ours comes back on any exit."""
    used = model.config._attn_implementation  # noqa: SLF001  (transformers has no public name for it)
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(used)


@contextmanager
def _no_defaults(model: Any) -> Iterator[None]:
    """``generate`` fills what a configuration leaves open from the model's own one, ending ids included."""
    from transformers import GenerationConfig

    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


@contextmanager
def _cached_once(model: Any) -> Iterator[Iterator[int]]:
    """Assisted decoding feeds the whole prompt in its first step, even on top of a cache that holds it: leave that out.

    What it yields counts the steps: its next value is how many there were.
    """
    steps = itertools.count()

    def only_new(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        cache: Any = named.get("cache", named.get("past_key_values"))
        new = named["input_ids"].shape[-1] - cache.get_seq_length()
        if next(steps) == 0 and new > 0:
            for name in ("input_ids", "position_ids", "cache_position"):
                if named.get(name) is not None:
                    named[name] = named[name][..., -new:]
        return arguments, named

    hook = model.register_forward_pre_hook(only_new, with_kwargs=True)
    try:
        yield steps
    finally:
        hook.remove()


def _cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    """The cache under the name that this release of transformers has for it; newer ones call it ``cache``."""
    new = "cache" in inspect.signature(model.forward).parameters
    return {"cache" if new else "past_key_values": cache}


def _nbytes(cache: Any) -> int:
    parts = [part for layer in cache.layers for part in (layer.keys, layer.values) if part is not None]
    return sum(part.numel() * part.element_size() for part in parts)
