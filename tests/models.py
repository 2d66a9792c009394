"""Random-weight models of a few kilobytes, engines over them, and an oracle that shares no code with the runtime."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from vericache_core.config import EngineConfig
from vericache_core.engine import Engine
from vericache_core.plugins.registry import Registry
from vericache_core.plugins.spec import CompressorSpec

VOCAB = 512
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_SPECIAL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "gemma3": (
        "Gemma3Text",
        {
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 16,
        },
    ),
    "gpt2": (
        "GPT2",
        {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 1024, "n_inner": 96},
    ),
    "phi3": ("Phi3", {"partial_rotary_factor": 0.5}),
}
ARCHITECTURES = tuple(_SPECIAL)
MODEL_CLASS = {"gemma3": "Gemma3ForCausalLM", "gpt2": "GPT2LMHeadModel"}


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """A fresh model. ``near_tie`` is a Llama on whose output head every second row nearly repeats its neighbour."""
    if name == "near_tie":
        return _near_tie(dtype, seed, **changes)
    family, own = _SPECIAL[name]
    settings = {**({"vocab_size": VOCAB} if name == "gpt2" else _COMMON), **own, **changes}
    if name == "gpt2":
        settings |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    config = getattr(transformers, f"{family}Config")(**settings)
    model = from_config(MODEL_CLASS.get(name, f"{family}ForCausalLM"), config, seed)
    if name == "gpt2":
        with torch.no_grad():
            model.transformer.wpe.weight.mul_(20)
    return model.to(dtype).eval()


def from_config(class_name: str, config: Any, seed: int = 0) -> Any:
    """A model of a transformers class with larger weights than the default ones, so that logits are far apart."""
    torch.manual_seed(seed)
    model = getattr(transformers, class_name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(4)
    return model.eval()


def _near_tie(dtype: torch.dtype, seed: int, **changes: Any) -> Any:
    settings = {**_COMMON, "vocab_size": 128, "num_hidden_layers": 2, **changes}
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).eval()
    with torch.no_grad():
        head = model.lm_head.weight
        head.mul_(20)
        head[1::2] = head[0::2] + 1e-7 * torch.randn_like(head[0::2])
    return model.to(dtype)


@functools.cache
def model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A shared model; a test that changes it builds its own with `build`."""
    return build(name, dtype)


def engine(name: str = "llama", dtype: torch.dtype = torch.float32, **settings: Any) -> Engine:
    """An engine over a shared model: 16 rows, window 4, no probe, no installed plugins."""
    return engine_over(model(name, dtype), **settings)


def engine_over(loaded: Any, tokenizer: Any = None, specs: Sequence[CompressorSpec] = (), **settings: Any) -> Engine:
    """An engine over ``loaded`` that knows the built-in compressors and ``specs``, and no installed ones."""
    registry = Registry(discover=False)
    for spec in specs:
        registry.register(spec)
    chosen = {"rows": 16, "window": 4, "probe": False, "compressor": "identity", "full_kv": "device", **settings}
    return Engine(loaded, tokenizer, EngineConfig(**chosen), registry)


def prompt(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    """Random token ids."""
    drawn: list[int] = torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return drawn


@torch.no_grad()
def full_forward_decode(loaded: Any, ids: Sequence[int], tokens: int) -> tuple[list[int], Tensor]:
    """Greedy decoding by whole forwards through the model's own eager attention, in its own dtype, without a cache.

    Returns the tokens and the logits row behind each.
    """
    tokens_so_far, rows = list(ids), []
    used = loaded.config._attn_implementation
    loaded.set_attn_implementation("eager")
    try:
        for _ in range(tokens):
            row = loaded(input_ids=torch.tensor([tokens_so_far])).logits[0, -1]
            rows.append(row)
            tokens_so_far.append(int(row.argmax()))
    finally:
        loaded.set_attn_implementation(used)
    return tokens_so_far[len(ids) :], torch.stack(rows)
