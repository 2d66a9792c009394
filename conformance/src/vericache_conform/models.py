"""Tiny models with random weights, one per supported architecture, and the fixture whose tokens nearly tie.

All have real attention patterns: queries and keys are scaled up, so that what is evicted matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from vericache_core.kv import LayerDescriptor

VOCAB: Final = 320
HEADS: Final = 4
KV_HEADS: Final = 2
WINDOW: Final = 8
NEAR_TIE: Final = "near-tie"
LLAMA: Final = "llama"
_COMMON: Final[dict[str, Any]] = {
    "vocab_size": VOCAB,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ARCHITECTURES: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    LLAMA: ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "gemma3": (
        "Gemma3Text",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "tie_word_embeddings": False,
        },
    ),
    "phi3": ("Phi3", {"partial_rotary_factor": 0.5, "sliding_window": None}),
    "granite": ("Granite", {"attention_multiplier": 0.2}),
    "olmo2": ("Olmo2", {}),
    "gpt-neox": ("GPTNeoX", {}),
    "gpt2": ("GPT2", {}),
}
"""Name -> (transformers' class, what differs). Mistral has sliding windows in every layer: there all stays exact."""

MAY_BE_REFUSED: Final = frozenset({"gpt2"})
"""Refused by the engine on some releases of transformers; then the architecture is not supported there."""


def build(name: str, head_dim: int, seed: int = 0) -> Any:
    """A ``transformers`` causal LM in evaluation mode, float32; the same weights for the same arguments."""
    import transformers

    family, changes = ARCHITECTURES[LLAMA if name == NEAR_TIE else name]
    settings = {**_COMMON, "hidden_size": HEADS * head_dim, "head_dim": head_dim, **changes}
    if family == "GPT2":
        settings = {
            "vocab_size": VOCAB,
            "n_embd": HEADS * head_dim,
            "n_layer": 3,
            "n_head": HEADS,
            "n_positions": 2048,
            "initializer_range": 0.1,
            "bos_token_id": None,
            "eos_token_id": None,
        }
    if family == "GPTNeoX":
        del settings["num_key_value_heads"], settings["head_dim"]
    if name == NEAR_TIE:
        settings |= {"vocab_size": 128, "num_hidden_layers": 2}
    state = torch.get_rng_state()
    try:
        torch.manual_seed(1000 + seed)
        config = getattr(transformers, f"{family}Config")(**settings)
        model = getattr(transformers, _class_name(family))(config).eval()
        _sharpen(model, name)
    finally:
        torch.set_rng_state(state)
    return model


def _class_name(family: str) -> str:
    return {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}.get(family, f"{family}ForCausalLM")


def _sharpen(model: Any, name: str) -> None:
    """Spread the attention; let positions count in GPT-2; make pairs of tokens nearly tie in the near-tie model."""
    with torch.no_grad():
        for label, weight in model.named_parameters():
            if weight.dim() == 2 and any(part in label for part in ("q_proj", "k_proj", "qkv", "query_key_value", "c_attn")):
                weight.mul_(2.0)
        if name == "gpt2":
            model.transformer.wpe.weight.mul_(5.0)
        head = model.get_output_embeddings().weight
        if name == NEAR_TIE:
            head.mul_(5.0)
            pairs = head[0::2]
            head[1::2] = pairs + 1e-7 * torch.randn(pairs.shape)


def shaped(layers: Sequence[LayerDescriptor], seed: int) -> Any:
    """A Llama with as many layers and heads, and the same dtype, as these descriptors; attention is ``sdpa``."""
    import transformers

    first = layers[0]
    settings = {
        **_COMMON,
        "hidden_size": first.heads * 16,
        "num_hidden_layers": len(layers),
        "num_attention_heads": first.heads,
        "num_key_value_heads": first.kv_heads,
        "head_dim": first.head_dim,
    }
    state = torch.get_rng_state()
    try:
        torch.manual_seed(2000 + seed)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).eval()
    finally:
        torch.set_rng_state(state)
    return model.to(first.dtype)


class ToyTokenizer:
    """Enough of a tokenizer for compressors that ask for one: a byte is an id, an id is a letter."""

    all_special_ids: tuple[int, ...] = ()
    eos_token_id: int | None = None

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [byte % self.vocab for byte in text.encode()]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + token % 26) for token in token_ids)


def prompt(tokens: int, seed: int, vocab: int) -> list[int]:
    """Random token ids with a repeated part, as texts have."""
    draw = torch.Generator().manual_seed(seed * 7919 + tokens)
    ids: list[int] = torch.randint(0, vocab, (tokens,), generator=draw).tolist()
    part = tokens // 4
    if part:
        ids[tokens // 2 : tokens // 2 + part] = ids[:part]
    return ids
