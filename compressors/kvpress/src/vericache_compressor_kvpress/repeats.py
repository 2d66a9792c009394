"""Presses that read the prompt more than once: their own steps, on a full cache of the pass's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vericache_compressor_kvpress.replay import as_ids, attending, cache_in, decoder_of, lent_rotary, run
from vericache_compressor_kvpress.survivors import masked_survivors

Encode = Callable[[str], list[int]]


def reconstructed(
    press: Any, model: Any, token_ids: Sequence[int], start: int, encode: Encode, kept: int
) -> dict[int, list[Tensor]]:
    """Survivors of ``KVzipPress`` or ``KVgradPress``: per layer and KV head the positions that it does not mask.

    What their context managers do around a prefill, without a tokenizer in a folder and without changing the model.

    Args:
        press: without a ratio.
        model: of ``transformers``; every layer attends in full.
        token_ids: the prompt.
        start: tokens in front that are no context (the prefix of a chat template), which the press never scores.
        encode: text to token ids.
        kept: tokens kept per KV head on average; the press rounds what it removes down.
    """
    from transformers import DynamicCache

    decoder, cache, ids = decoder_of(model), DynamicCache(), as_ids(model, token_ids)
    layers = [layer.self_attn for layer in decoder.layers]
    pairs = len(layers) * model.config.num_key_value_heads
    press.compression_ratio = 1 - (kept - 0.25 / pairs) / len(token_ids)
    press.prefix_length, press._context_ids, press._cache = start, ids, cache  # noqa: SLF001  # what __call__ would set
    press._suffix_ids = torch.tensor([encode("\n")], dtype=torch.long)  # noqa: SLF001  # as for models without template
    press.forward_hook = _with_former_names(press.forward_hook)
    with torch.inference_mode(False), torch.no_grad(), lent_rotary(decoder):
        run(decoder, ids, cache)
        try:
            press._perform_kvzip_compression(model, _Encoder(encode))  # noqa: SLF001
            found = {module.layer_idx: masked_survivors(module, cache_heads(cache, 0), len(token_ids)) for module in layers}
        finally:
            for module in layers:
                vars(module).pop("masked_key_indices", None)
    everything = torch.arange(len(token_ids))
    return {index: heads or [everything] * cache_heads(cache, 0) for index, heads in found.items()}


def read_twice(press: Any, model: Any, token_ids: Sequence[int], kept: int) -> dict[int, list[Tensor]]:
    """Survivors of ``KVComposePress``: per layer and KV head the positions of its mask.

    Args:
        press: without a ratio.
        model: of ``transformers``; attends eagerly meanwhile.
        token_ids: the prompt.
        kept: tokens kept per KV head on average.
    """
    from transformers import DynamicCache

    decoder, cache, ids = decoder_of(model), DynamicCache(), as_ids(model, token_ids)
    press.compression_ratio = 1 - (kept + 0.25 / (len(decoder.layers) * model.config.num_key_value_heads)) / len(token_ids)
    press._register_model(model)  # noqa: SLF001  # the steps of its __call__
    press.register_context_ids(ids)
    with torch.no_grad(), attending(model, eager=True), lent_rotary(decoder):
        run(decoder, ids, cache)
        with _hooked(decoder, press.forward_hook):
            run(decoder, ids, cache)
    cache.crop(len(token_ids))
    press._register_cache(cache)  # noqa: SLF001
    press.prepare_important_masks()
    masks = press.important_mask_per_kv_head
    return {index: [torch.nonzero(mask.cpu()).flatten() for mask in heads] for index, heads in enumerate(masks)}


def cache_heads(cache: Any, layer: int) -> int:
    """KV heads of a layer."""
    return int(cache.layers[layer].keys.shape[1])


class _Encoder:
    """As much of a tokenizer as the presses call."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode

    def encode(self, text: str, **_: Any) -> Tensor:
        return torch.tensor([self._encode(text)], dtype=torch.long)


def _with_former_names(hook: Callable[..., Any]) -> Callable[..., Any]:
    def shim(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        return hook(module, args, {**kwargs, "past_key_values": cache_in(kwargs)}, output)

    return shim


@contextmanager
def _hooked(decoder: Any, hook: Callable[..., Any]) -> Iterator[None]:
    handles = [layer.self_attn.register_forward_hook(hook, with_kwargs=True) for layer in decoder.layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
