"""Engines over random weights on a device: each drafting with a compressor, on each tier, against plain decoding."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from gpu_parts import installed, note, require

from vericache_core import Engine, EngineConfig, SamplingParams


def small_model(dtype: torch.dtype, device: torch.device) -> Any:
    """A random-weight Llama with grouped heads of 64."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=997,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(3)
    return model.to(device, dtype).eval()


def engines(small: bool) -> Iterator[tuple[str, dict[str, Any], str, str]]:
    """``(compressor, options, tier, attention)`` of every cell."""
    names: list[tuple[str, dict[str, Any]]] = [("random", {"keep": 0.3}), ("adversarial", {})]
    names += [(name, options | ({"residual": 32} if name == "kivi" else {})) for name, options in installed()]
    for name, options in names[:1] if small else names:
        for tier in ("host",) if small else ("device", "host", "disk"):
            yield name, options, tier, "triton"
    if not small:
        yield "random", {"keep": 0.3}, "host", "reference"


def check_engines(device: torch.device, small: bool) -> list[dict[str, Any]]:
    """Probe, then identity of drafting engines with plain decoding; one record a cell."""
    records = []
    params = SamplingParams(max_new_tokens=4 if small else 48)
    lengths = (9,) if small else (300, 17, 131)
    prompts = [torch.randint(0, 997, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths]
    for dtype in (torch.float32,) if small else (torch.float32, torch.bfloat16):
        model = small_model(dtype, device)
        for name, options, tier, attention in engines(small):
            config = EngineConfig(
                compressor=name,
                options=options,
                full_kv=tier,  # type: ignore[arg-type]  # one of its words
                attention=attention,  # type: ignore[arg-type]
                rows=4 if small else 32,
                window=2 if small else 6,
                fold=40,
                probe=not small,
            )
            started = time.perf_counter()
            with Engine(model, None, config) as engine:
                expected = engine.generate(prompts, params, compressor=None, record_logits=True)
                found = engine.generate(prompts, params, record_logits=True)
            same = all(same_answer(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
            degraded = [text for output in found for text in output.metrics.degraded]
            record = {
                "dtype": str(dtype).removeprefix("torch."),
                "compressor": name,
                "options": options,
                "tier": tier,
                "attention": attention,
                "identical": same,
                "accepted": sum(output.metrics.accepted for output in found),
                "drafted": sum(output.metrics.drafted for output in found),
                "swap_bytes": sum(output.metrics.swap_bytes for output in found),
                "degraded": degraded,
                "seconds": round(time.perf_counter() - started, 2),
            }
            records.append(record)
            note(json.dumps(record))
            require(same and not degraded, f"{name} {options} on {tier}, {dtype}: {degraded or 'other tokens or logits'}")
    return records


def same_answer(mine: Any, theirs: Any) -> bool:
    """Whether two outputs have the same tokens and the same bits of logits."""
    if mine.error is not None or mine.token_ids != theirs.token_ids:
        return False
    return torch.equal(mine.logits, theirs.logits)
