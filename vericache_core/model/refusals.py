"""Which models cannot be run exactly, told by name from the config before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vericache_core.errors import UnsupportedModelError

KNOWN_LAYERS = {"full_attention", "sliding_attention", "attention", "global", "local"}
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def refuse_by_config(config: Any) -> None:
    """Raise ``UnsupportedModelError`` for what the fixed-shape runtime cannot do exactly.

    Refused: encoder-decoder models, multi-head latent attention, recurrent and linear-attention layers,
    rotary scaling whose angles depend on the sequence length, attention with soft-capping or sinks.
    """
    name = getattr(config, "model_type", type(config).__name__)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name}: encoder-decoder models are not supported", hint="use a decoder-only causal LM")
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModelError(f"{name}: multi-head latent attention (MLA) is not supported", cause="kv_lora_rank is set")
    for field in ("layer_types", "layers_block_type"):
        strange = sorted({str(kind) for kind in getattr(config, field, None) or ()} - KNOWN_LAYERS)
        if strange:
            raise UnsupportedModelError(
                f"{name}: layers of type {', '.join(strange)} are not supported",
                cause="recurrent, linear and chunked layers keep a state that cannot be rolled back by token",
            )
    for kind in rope_types(config):
        if kind in LENGTH_DEPENDENT_ROPE:
            raise UnsupportedModelError(
                f"{name}: rotary scaling of type {kind!r} is not supported",
                cause="its angles depend on the length of the sequence, so KV rows would not be history independent",
            )
    if getattr(config, "alibi", False):
        raise UnsupportedModelError(f"{name}: ALiBi position biases are not supported")


def refuse_by_facts(name: str, layer: int, facts: Mapping[str, Any]) -> None:
    """Raise for attention arguments that change the arithmetic and that we do not implement."""
    for fact, meaning in (
        ("softcap", "logit soft-capping"),
        ("s_aux", "attention sinks"),
        ("position_bias", "a position bias"),
    ):
        if facts.get(fact) is not None:
            raise UnsupportedModelError(f"{name}: layer {layer} uses {meaning}, which is not supported", cause=f"{fact} is set")


def rope_types(config: Any) -> Iterator[str]:
    """Types of rotary scaling in the config, whichever release wrote it."""
    for settings in rope_settings(config):
        kind = settings.get("rope_type", settings.get("type"))
        if kind is not None:
            yield str(kind)


def rope_settings(config: Any) -> Iterator[Mapping[str, Any]]:
    """Every rotary parameter block: one for all layers, or one per layer type."""
    for field in ("rope_parameters", "rope_scaling"):
        block = getattr(config, field, None)
        if isinstance(block, Mapping):
            nested = [inner for inner in block.values() if isinstance(inner, Mapping)]
            yield from nested or [block]
