"""Survivors against the real press: what it leaves in a cache of its own, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from vericache_compressor_kvpress import KvpressCompressor, KvpressOptions
from vericache_compressor_kvpress.library import build_press, kvpress
from vericache_compressor_kvpress.plugin import vericache_compressors
from vericache_compressor_kvpress.survivors import masked_survivors, matched_survivors
from vericache_compressor_kvpress.table import PRESSES
from vericache_core import CompressContext, EngineConfig, LayerDescriptor, PrefixView, Registry, SamplingParams
from vericache_core.engine import Engine
from vericache_core.errors import MissingDependencyError, OptionError
from vericache_core.kv import PlainLayer

try:
    kvpress()
except MissingDependencyError as missing:
    pytest.skip(f"kvpress is not importable here: {missing}", allow_module_level=True)

TOKENS, KEPT = 150, 60
ARGUMENTS = {
    "snapkv": ("window_size=16",),
    "pyramid-kv": ("window_size=16",),
    "lag-kv": ("lag_size=32",),
    "sim-layer-kv": ("lazy_threshold=0.0", "n_recent=30"),
    "expected-attention": ("n_future_positions=64",),
}
INNER = {
    "ada-kv": "KnormPress",
    "chunk-kv": "KnormPress",
    "entropy-gated-chunk-kv": "KnormPress",
    "critical-ada-kv": "KnormPress",
}
TIES = {"lag-kv"}
"""Ranks repeat across partitions, so equal scores lie on both sides of the cut."""


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    made = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(4)
    return made


IDS = torch.randint(0, 256, (TOKENS,), generator=torch.Generator().manual_seed(3)).tolist()


def options(name: str) -> KvpressOptions:
    return KvpressOptions(keep_tokens=KEPT, inner=INNER.get(name), arguments=ARGUMENTS.get(name, ()))


def full_rows(model: Any) -> list[tuple[Tensor, Tensor]]:
    cache = transformers.DynamicCache()
    with torch.no_grad():
        model.model(input_ids=torch.tensor([IDS]), past_key_values=cache, use_cache=True)
    return [(layer.keys[0].clone(), layer.values[0].clone()) for layer in cache.layers]


def descriptors(model: Any) -> list[LayerDescriptor]:
    return [
        LayerDescriptor(i, "full", 4, 2, 16, 16, torch.float32, 0.25, rope_theta=10_000.0, rotary_dim=16)
        for i in range(model.config.num_hidden_layers)
    ]


def compress(model: Any, name: str, protected: tuple[tuple[int, int], ...] = ()) -> Any:
    rows = full_rows(model)
    view = PrefixView.from_tensors(descriptors(model), [k for k, _ in rows], [v for _, v in rows], IDS)
    context = CompressContext(protected=protected, model_reader=lambda: model)
    return KvpressCompressor(name, options(name)).compress(view, context)


def real_survivors(model: Any, name: str) -> list[list[Tensor]]:
    """Run the press as kvpress means it to be run."""
    press = build_press(name, options(name))
    if PRESSES[name].ratio:
        for part in (getattr(press, "press", None), press):
            if part is not None:
                part.compression_ratio = 1 - (KEPT + 0.5) / TOKENS
    used = model.config._attn_implementation
    cache = transformers.DynamicCache()
    if PRESSES[name].eager:
        model.set_attn_implementation("eager")
    torch.manual_seed(0)
    try:
        before = full_rows(model)
        with torch.no_grad(), press(model):
            model.model(input_ids=torch.tensor([IDS]), past_key_values=cache, use_cache=True)
    finally:
        model.set_attn_implementation(used)
    found = []
    for index, (keys, _) in enumerate(before):
        masked = masked_survivors(model.model.layers[index].self_attn, 2, TOKENS)
        found.append(masked or matched_survivors(keys.unsqueeze(0), cache.layers[index].keys))
    return found


@pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 4), reason="kvpress's own hook dies on transformers >= 5.4"
)
@pytest.mark.parametrize("name", PRESSES)
def test_survivors_are_those_of_the_real_press(model: Any, name: str) -> None:
    made = compress(model, name)
    expected = real_survivors(model, name)
    rows = full_rows(model)
    for index, layer in enumerate(made.layers):
        for head in range(2):
            kept = layer.surviving.head(head)
            if name in TIES:
                assert len(kept) == len(expected[index][head])
                continue
            assert kept.tolist() == expected[index][head].tolist(), (index, head)
            keys, values = layer.head(head)  # of the full KV, whichever way the press's pass attended
            assert torch.equal(keys, rows[index][0][head][kept])
            assert torch.equal(values, rows[index][1][head][kept])


@pytest.mark.parametrize("name", PRESSES)
def test_the_model_is_left_as_it_was(model: Any, name: str) -> None:
    before = {key: value.clone() for key, value in model.state_dict().items()}
    modules, rows = [n for n, _ in model.named_modules()], full_rows(model)
    first, again = compress(model, name), compress(model, name)
    assert first.surviving == again.surviving
    first.check_integrity()
    assert [n for n, _ in model.named_modules()] == modules
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(layer.self_attn._forward_hooks for layer in model.model.layers)
    assert all(torch.equal(a, b) for x, y in zip(rows, full_rows(model), strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("name", ["tova", "ada-kv", "streaming-llm"])
def test_protected_spans_survive(model: Any, name: str) -> None:
    made = compress(model, name, protected=((10, 25),))
    for layer in made.layers:
        assert all(set(range(10, 25)) <= set(layer.surviving.head(head).tolist()) for head in range(2))


SHORTEST = {
    "tova": 2,
    "streaming-llm": 5,
    "expected-attention": 5,
    "critical-kv": 5,
    "cap": 5,
    "leverage-score": 2,
    "compactor": 14,
    "snapkv": 65,
    "pyramid-kv": 65,
    "ada-kv": 65,
    "chunk-kv": 65,
    "entropy-gated-chunk-kv": 65,
    "critical-ada-kv": 65,
}


@pytest.mark.parametrize("name", PRESSES)
def test_a_prompt_that_a_press_finds_too_short_survives_whole(model: Any, name: str) -> None:
    rows = full_rows(model)
    compressor = KvpressCompressor(name, KvpressOptions(keep=0.5))  # arguments of the press at their defaults
    least = SHORTEST.get(name, 1)
    assert compressor.shortest == least
    for tokens in sorted({0, 1, 2, least - 1, least, least + 1}):
        view = PrefixView.from_tensors(
            descriptors(model), [k[:, :tokens] for k, _ in rows], [v[:, :tokens] for _, v in rows], IDS[:tokens]
        )
        made = compressor.compress(view, CompressContext(model_reader=lambda: model))
        made.check_integrity()
        if tokens < least:
            for index, layer in enumerate(made.layers):
                assert isinstance(layer, PlainLayer)
                assert layer.surviving.counts == (tokens, tokens)
                assert torch.equal(torch.stack([layer.head(h)[0] for h in range(2)]), rows[index][0][:, :tokens])
        elif PRESSES[name].scorer:
            assert {layer.surviving.counts for layer in made.layers if layer is not None} == {(max(1, tokens // 2),) * 2}


def test_importing_kvpress_changes_no_attention_function() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert kvpress() is not None
    assert not any("kvpress" in str(getattr(f, "__module__", "")) for f in ALL_ATTENTION_FUNCTIONS.values())


def test_bad_settings_are_refused_when_built() -> None:
    with pytest.raises(OptionError, match="wraps no other press"):
        KvpressCompressor("tova", KvpressOptions(inner="KnormPress"))
    with pytest.raises(OptionError, match="no scorer"):
        KvpressCompressor("ada-kv", KvpressOptions(inner="Nothing"))
    with pytest.raises(OptionError, match="does not take"):
        KvpressCompressor("tova", KvpressOptions(arguments=("wind=3",)))


@pytest.mark.parametrize("name", ["kvpress-tova", "kvpress-ada-kv", "kvpress-observed-attention", "kvpress-expected-attention"])
def test_an_engine_writes_what_the_full_kv_writes(name: str) -> None:
    registry = Registry(discover=False)
    for spec in vericache_compressors():
        registry.register(spec)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    loaded = transformers.LlamaForCausalLM(config).eval()
    settings = EngineConfig(compressor=name, keep=0.8, rows=16, window=4, probe=False)
    params = SamplingParams(max_new_tokens=20)
    with Engine(loaded, None, settings, registry) as engine:
        (plain,) = engine.generate(IDS[:80], params, compressor=None, record_logits=True)
        (found,) = engine.generate(IDS[:80], params, record_logits=True)
    assert not found.metrics.degraded
    assert found.metrics.accepted > 0
    assert found.token_ids == plain.token_ids
    assert found.logits is not None
    assert plain.logits is not None
    assert torch.equal(found.logits, plain.logits)
