"""One pass of the model over the prompt, with a press looking at every layer and nothing of ours to touch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vericache_core.errors import CompressorFault


@dataclass(frozen=True)
class LayerCall:
    """What one attention layer was called with, in the shape that presses expect.

    Attributes:
        module: the attention module.
        hidden_states: ``[1, tokens, hidden]``.
        keys, values: ``[1, kv_heads, tokens, ...]``, clones that may be changed.
        attentions: ``[1, heads, tokens, tokens]`` where the model attends eagerly.
        kwargs: of the module, with the two entries that presses read in every version of transformers.
        output: of the module.
    """

    module: Any
    hidden_states: Tensor
    keys: Tensor
    values: Tensor
    attentions: Tensor | None
    kwargs: dict[str, Any]
    output: Any


@dataclass
class _ShadowLayer:
    keys: Tensor
    values: Tensor


class ShadowCache:
    """Stands where a press expects a cache: one layer's clones, by layer number."""

    def __init__(self, index: int, keys: Tensor, values: Tensor) -> None:
        self.layers = {index: _ShadowLayer(keys, values)}


def replay(
    model: Any, token_ids: Sequence[int], layers: Sequence[int], see: Callable[[int, LayerCall], None], *, eager: bool
) -> None:
    """Run ``token_ids`` through ``model`` and show each of ``layers``, in order; the model is left as it was.

    The pass has a cache of its own, emptied layer by layer, so memory holds one layer's rows at a time.
    """
    from transformers import DynamicCache

    decoder = decoder_of(model)
    with _hooks(decoder, layers, see, len(token_ids)), attending(model, eager=eager), torch.no_grad():
        run(decoder, as_ids(model, token_ids), DynamicCache())


def as_ids(model: Any, token_ids: Sequence[int]) -> Tensor:
    """Integers ``[1, tokens]`` where the model is."""
    return torch.tensor([list(token_ids)], dtype=torch.long, device=next(model.parameters()).device)


def run(decoder: Any, ids: Tensor, cache: Any) -> None:
    """Run ``ids`` ``[1, tokens]`` behind what ``cache`` holds."""
    parameters = inspect.signature(decoder.forward).parameters
    decoder(input_ids=ids, use_cache=True, **{"past_key_values" if "past_key_values" in parameters else "cache": cache})


def decoder_of(model: Any) -> Any:
    """The stack of layers, as kvpress finds it.

    Raises:
        CompressorFault: it is somewhere else.
    """
    inner = getattr(model, "model", None)
    decoder = getattr(inner, "language_model", inner)
    first = next(iter(getattr(decoder, "layers", ())), None)
    if not hasattr(first, "self_attn"):
        raise CompressorFault(f"kvpress does not know the layout of {type(model).__name__}")
    return decoder


@contextmanager
def _hooks(decoder: Any, layers: Sequence[int], see: Callable[[int, LayerCall], None], tokens: int) -> Iterator[None]:
    handles: list[Any] = []

    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        index = module.layer_idx
        cache = cache_in(kwargs)
        held = cache.layers[index]
        if index in wanted:
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            positions = torch.arange(tokens - hidden.shape[1], tokens, device=hidden.device)
            keys, values = held.keys.clone(), held.values.clone()
            shadow = ShadowCache(index, keys, values)
            known = {**kwargs, "hidden_states": hidden, "past_key_values": shadow, "cache_position": positions}
            attentions = output[1] if len(output) > 1 else None
            see(index, LayerCall(module, hidden, keys, values, attentions, known, output))
        held.keys, held.values = held.keys[:, :, :0].clone(), held.values[:, :, :0].clone()

    wanted = set(layers)
    with lent_rotary(decoder):
        try:
            handles += [layer.self_attn.register_forward_hook(hook, with_kwargs=True) for layer in decoder.layers]
            yield
        finally:
            for handle in handles:
                handle.remove()


def cache_in(kwargs: dict[str, Any]) -> Any:
    """The cache among the arguments of an attention module: 5.24 calls it ``cache``, 5.2 and presses ``past_key_values``."""
    return kwargs["past_key_values"] if "past_key_values" in kwargs else kwargs["cache"]


@contextmanager
def lent_rotary(decoder: Any) -> Iterator[None]:
    """Each attention module with the rotary embedding of the model, where presses look for it."""
    rotary, borrowed = getattr(decoder, "rotary_emb", None), []
    kinds = "layer_type" in inspect.signature(rotary.forward).parameters if rotary is not None else False
    try:
        for number, layer in enumerate(decoder.layers):
            if not hasattr(layer.self_attn, "rotary_emb") and rotary is not None:
                # Gemma 3 has one embedding for each kind of layer; presses know of no kinds.
                lent = partial(rotary, layer_type=decoder.config.layer_types[number]) if kinds else rotary
                layer.self_attn.rotary_emb = lent
                borrowed.append(layer.self_attn)
        yield
    finally:
        for module in borrowed:
            del module.rotary_emb


@contextmanager
def attending(model: Any, *, eager: bool) -> Iterator[None]:
    """The model attending eagerly, or as it does."""
    used = model.config._attn_implementation  # noqa: SLF001  # transformers offers a setter but no getter
    if not eager:
        yield
        return
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(used)
