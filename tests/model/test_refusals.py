"""Models that cannot be run exactly are refused by name, before anything runs; and those whose config hides it, by number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.models import build, engine_over, from_config
from vericache_core.attention.paged import AttentionJob, attend_reference
from vericache_core.engine import Engine
from vericache_core.errors import IdentityError, UnsupportedModelError
from vericache_core.model.adapter import ModelAdapter
from vericache_core.model.admission import admit

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}

REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "multi-head latent attention": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 16,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 2,
        },
        "latent attention",
    ),
    "linear attention": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "head_dim": 8,
        },
        "linear_attention",
    ),
    "recurrent": ("MambaConfig", "MambaForCausalLM", {"state_size": 4}, "layers"),
    "hybrid recurrent": (
        "BambaConfig",
        "BambaForCausalLM",
        {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8},
        "mamba|linear_attention",
    ),
    "dynamic rotary scaling": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
        "dynamic",
    ),
    "longrope": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "long_factor": [1.0] * 4,
                "short_factor": [1.0] * 4,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 128,
            },
            "original_max_position_embeddings": 128,
            "pad_token_id": 0,
        },
        "longrope",
    ),
    "soft-capping": ("Gemma2Config", "Gemma2ForCausalLM", {"head_dim": 8, "attn_logit_softcapping": 50.0}, "soft-capping"),
    "attention sinks": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
        "sinks",
    ),
    "outside of the interface": ("FalconConfig", "FalconForCausalLM", {"ffn_hidden_size": 48}, "interface|layer index"),
    "alibi": ("FalconConfig", "FalconForCausalLM", {"alibi": True, "ffn_hidden_size": 48}, "ALiBi"),
    "encoder-decoder": (
        "T5Config",
        "T5ForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        "encoder-decoder",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_run_exactly_is_refused_by_name(kind: str) -> None:
    config_name, class_name, own, message = REFUSED[kind]
    config = getattr(transformers, config_name)(**{**SMALL, **own})
    loaded = from_config(class_name, config)
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        engine_over(loaded)
    assert caught.value.exit_code == 2


def test_a_model_whose_window_we_are_not_told_of_is_refused_by_the_numbers() -> None:
    """The window is applied through the mask only; nothing in the attention call names it."""
    loaded = build("mistral")
    for layer in loaded.model.layers:
        forward = layer.self_attn.forward

        def hiding(*args: Any, _module: Any = layer.self_attn, _forward: Any = forward, **kwargs: Any) -> Any:
            window, _module.config.sliding_window = _module.config.sliding_window, None
            try:
                return _forward(*args, **kwargs)
            finally:
                _module.config.sliding_window = window

        layer.self_attn.forward = hiding
    with pytest.raises(UnsupportedModelError, match="differ from the model's own forward"):
        engine_over(loaded)


@pytest.mark.parametrize("wrong", ["mask", "window", "positions", "scaling"])
def test_an_attention_that_ignores_something_is_refused_by_the_numbers(wrong: str) -> None:
    def ignoring(query: Tensor, keys: Tensor, values: Tensor, jobs: list[AttentionJob], factor: float) -> Tensor:
        for job in jobs:
            if wrong == "window":
                job.window = None
            if wrong == "mask":  # every row of a block sees the whole block
                job.base = job.base + 0
                query = query.clone()
                query[job.first : job.first + job.count] = query[job.first + job.count - 1]
        if wrong == "scaling":
            query = query * 1.01
        if wrong == "positions":
            keys = keys.roll(1, -1)
        return attend_reference(query, keys, values, jobs, factor)

    adapter = ModelAdapter(build("mistral"), 16)
    admit(adapter, attend_reference, "bitwise", probe=False)
    with pytest.raises(UnsupportedModelError, match="differ"):
        admit(adapter, ignoring, "bitwise", probe=False)  # type: ignore[arg-type]


def depends_on_place(query: Tensor, keys: Tensor, values: Tensor, jobs: list[AttentionJob], factor: float) -> Tensor:
    """Right to a few bits, which depend on the row's place in the step."""
    output = attend_reference(query, keys, values, jobs, factor)
    shift = torch.arange(output.shape[0], dtype=torch.float32)[:, None, None]
    return output * (1 + shift * 2.0**-22)


def test_a_failing_probe_refuses_bitwise_by_name_and_allows_token() -> None:
    adapter = ModelAdapter(build("llama"), 16)
    with pytest.raises(IdentityError, match="bitwise") as caught:
        admit(adapter, depends_on_place, "bitwise")  # type: ignore[arg-type]
    assert "logits rows differ" in str(caught.value)
    allowed = admit(adapter, depends_on_place, "token")  # type: ignore[arg-type]
    assert allowed.identity == "token"
    assert allowed.probe is not None
    assert not allowed.probe.passed


def test_a_model_without_causal_attention_is_refused() -> None:
    loaded = build("llama")
    loaded.model.layers[1].self_attn.is_causal = False
    with pytest.raises(UnsupportedModelError, match="layer 1 is not causal"):
        Engine(loaded)


def test_outside_of_steps_an_admitted_model_answers_as_before() -> None:
    ids = torch.tensor([[5, 9, 2, 77]])
    before = build("gemma3")(input_ids=ids).logits
    loaded = build("gemma3")
    engine_over(loaded)
    assert torch.equal(loaded(input_ids=ids).logits, before)
    padded = {"input_ids": torch.tensor([[0, 0, 5, 9, 2, 77]]), "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1]])}
    torch.testing.assert_close(loaded(**padded).logits[:, 2:], before, atol=1e-4, rtol=1e-4)
