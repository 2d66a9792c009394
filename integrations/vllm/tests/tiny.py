"""Tiny random Llama models on disk, with a tokenizer, as vLLM's CPU kernels take them (head_dim at least 32)."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB = 512


def save_model(folder: Path, seed: int = 0, layers: int = 2, sharpness: float = 4.0) -> Path:
    """Save a model whose next token depends on the whole context; ``sharpness`` scales attention and logits apart."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        initializer_range=0.02,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        dtype="float32",
    )
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "proj" in name or "lm_head" in name or "embed" in name:
                weight.mul_(sharpness)
    model.save_pretrained(folder)
    words = {f"w{number}": number for number in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="w0", eos_token="w1", pad_token="w2").save_pretrained(folder)
    return folder


def prompt(length: int, seed: int) -> list[int]:
    """Random token ids without the special ones."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(4, VOCAB, (length,), generator=generator).tolist()
    return ids
