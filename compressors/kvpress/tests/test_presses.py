"""Survivors against the real press: what it leaves in a cache of its own, bit for bit."""

from __future__ import annotations

import dataclasses
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor

from vericache_compressor_kvpress import KvpressCompressor, KvpressOptions
from vericache_compressor_kvpress.library import build_press, kvpress
from vericache_compressor_kvpress.plugin import vericache_compressors
from vericache_compressor_kvpress.replay import replay
from vericache_compressor_kvpress.survivors import masked_survivors, matched_survivors
from vericache_compressor_kvpress.table import DOWNLOAD, NOT_OFFERED, PRESSES, REWRITES
from vericache_core import CompressContext, EngineConfig, LayerDescriptor, PrefixView, Registry, SamplingParams
from vericache_core.engine import Engine
from vericache_core.errors import CompressorFault, MissingDependencyError, OptionError
from vericache_core.kv import PlainLayer

try:
    kvpress()
except MissingDependencyError as missing:
    pytest.skip(f"kvpress is not importable here: {missing}", allow_module_level=True)

TOKENS, KEPT = 150, 60
ARGUMENTS = {
    "finch": ("window_size=16",),
    "dms": ("threshold=-2.6", "sliding_window_size=20"),
    "per-layer": ("compression_ratios=0.2:0.5:0.75",),
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
DELIMITER = next(token for token in range(256) if token not in IDS)


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


def view(model: Any) -> PrefixView:
    rows = full_rows(model)
    return PrefixView.from_tensors(descriptors(model), [k for k, _ in rows], [v for _, v in rows], IDS)


def compress(model: Any, name: str, protected: tuple[tuple[int, int], ...] = ()) -> Any:
    context = CompressContext(protected=protected, model_reader=lambda: model, encoder=encode)
    return KvpressCompressor(name, options(name)).compress(view(model), context)


def encode(text: str) -> list[int]:
    """A tokenizer of letters."""
    return [ord(letter) for letter in text]


class Letters:
    """It as the engine wants it."""

    all_special_ids: tuple[int, ...] = ()
    eos_token_id: int | None = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return encode(text)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, token_ids))


def save_tokenizer(folder: Path) -> None:
    """The same one in a folder, where presses look for it."""
    letters = Tokenizer(models.WordLevel({chr(code): code for code in range(256)}, unk_token=" "))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(folder)


def real_press(name: str) -> Any:
    """The press with its budget, by hand."""
    press, ratio = build_press(name, options(name)), 1 - (KEPT + 0.5) / TOKENS
    budget = PRESSES[name].budget
    if name == "composed":
        first = round((TOKENS * KEPT) ** 0.5)
        press.presses[0].compression_ratio = 1 - (first + 0.5) / TOKENS
        press.presses[1].compression_ratio = 1 - (KEPT + 0.5) / first
    elif PRESSES[name].route in ("reconstruct", "replay"):
        press.compression_ratio = 1 - KEPT / TOKENS  # of all pairs together, an exact number here
    elif budget == "ratio":
        for part in (getattr(press, "press", None), press):
            if part is not None:
                part.compression_ratio = ratio
    return press


def real_survivors(model: Any, name: str, folder: Path) -> list[list[Tensor]]:
    """Run the press as kvpress means it to be run."""
    press, ids = real_press(name), torch.tensor([IDS])
    if name == "finch":  # the delimiter says where the question begins, and is taken out again
        press.delimiter_token_id = DELIMITER
        ids = torch.tensor([[*IDS[:-16], DELIMITER, *IDS[-16:]]])
    used, name_or_path = model.config._attn_implementation, model.config._name_or_path
    cache = transformers.DynamicCache()
    if PRESSES[name].eager:
        model.set_attn_implementation("eager")
    if PRESSES[name].route == "reconstruct":
        save_tokenizer(folder)
        model.config._name_or_path = str(folder)
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None  # as kvpress's own attention does
    torch.manual_seed(0)
    try:
        before = full_rows(model)
        with torch.no_grad(), press(model):
            model.model(input_ids=ids, past_key_values=cache, use_cache=True)
    finally:
        model.set_attn_implementation(used)
        model.config._name_or_path = name_or_path
        vars(model.model).pop("forward", None)
        for layer in model.model.layers:
            del layer.self_attn.rotary_emb
    found = []
    for index, (keys, _) in enumerate(before):
        masked = masked_survivors(model.model.layers[index].self_attn, 2, TOKENS)
        if masked is None:
            masked = matched_survivors(keys.unsqueeze(0), cache.layers[index].keys)
        found.append(masked)
    return found


@pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 4), reason="kvpress's own hook dies on transformers >= 5.4"
)
@pytest.mark.parametrize("name", PRESSES)
def test_survivors_are_those_of_the_real_press(model: Any, name: str, tmp_path: Path) -> None:
    made = compress(model, name)
    expected = real_survivors(model, name, tmp_path)
    assert any(0 < len(head) < TOKENS for heads in expected for head in heads)
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
    modules, rows = [(n, *vars(module)) for n, module in model.named_modules()], full_rows(model)
    first, again = compress(model, name), compress(model, name)
    assert first.surviving == again.surviving
    first.check_integrity()
    assert [(n, *vars(module)) for n, module in model.named_modules()] == modules
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(layer.self_attn._forward_hooks for layer in model.model.layers)
    assert all(torch.equal(a, b) for x, y in zip(rows, full_rows(model), strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("name", ["tova", "ada-kv", "streaming-llm"])
def test_protected_spans_survive(model: Any, name: str) -> None:
    made = compress(model, name, protected=((10, 25),))
    for layer in made.layers:
        assert all(set(range(10, 25)) <= set(layer.surviving.head(head).tolist()) for head in range(2))


def test_every_press_of_kvpress_is_offered_or_has_a_reason() -> None:
    library = kvpress()
    classes = {
        name
        for name in library.__all__
        if isinstance(kind := getattr(library, name), type) and issubclass(kind, library.BasePress)
    }
    classes -= {"BasePress", "ScorerPress"}
    assert classes == {press.class_name for press in PRESSES.values()} | set(NOT_OFFERED)


@pytest.mark.parametrize("name", [name for name, (why, _) in NOT_OFFERED.items() if why == DOWNLOAD])
def test_what_is_said_to_need_a_download_fetches_something(name: str) -> None:
    source = inspect.getsource(inspect.getmodule(getattr(kvpress(), name)))  # type: ignore[arg-type]
    assert any(word in source for word in ("from_pretrained(", "hf_hub_download(", "requests.get(", "load_dataset("))


@pytest.mark.parametrize("name", [name for name, (why, _) in NOT_OFFERED.items() if why == REWRITES])
def test_what_is_said_to_rewrite_rows_leaves_none_as_it_was(model: Any, name: str) -> None:
    """Where its keys are still those of the cache, its values are not."""
    library = kvpress()
    kind = getattr(library, name)
    press = kind(key_channel_compression_ratio=0.5) if name == "ThinKPress" else kind(library.KnormPress(0.6))
    rows, after = full_rows(model), {}

    def see(index: int, call: Any) -> None:
        press.forward_hook(call.module, [], call.kwargs, call.output)
        layer = call.kwargs["past_key_values"].layers[index]
        after[index] = layer.keys, layer.values

    replay(model, IDS, [0, 1, 2], see, eager=False)
    for index, (keys, values) in after.items():
        changed = 0
        for before, part in zip(rows[index], (keys, values), strict=True):
            known = {bytes(row.numpy().tobytes()) for row in before[0]}
            changed = max(changed, sum(bytes(row.numpy().tobytes()) not in known for row in part[0, 0]))
        assert changed > keys.shape[2] // 2


@pytest.mark.parametrize("inner", ["KnormPress", "KeyDiffPress"])
def test_without_a_threshold_dms_drops_what_keep_asks_for(model: Any, inner: str) -> None:
    chosen = KvpressOptions(keep_tokens=KEPT, inner=inner, arguments=("sliding_window_size=20",))
    made = KvpressCompressor("dms", chosen).compress(view(model), CompressContext(model_reader=lambda: model))
    for layer in made.layers:
        assert isinstance(layer, PlainLayer)
        assert sum(layer.surviving.counts) == 2 * KEPT
        assert layer.surviving.counts[0] != KEPT  # shared by need
        assert set(range(TOKENS - 20, TOKENS)) <= set(layer.surviving.head(0).tolist())
    most = KvpressOptions(keep_tokens=1, inner=inner, arguments=("sliding_window_size=20",))
    made = KvpressCompressor("dms", most).compress(view(model), CompressContext(model_reader=lambda: model))
    assert {layer.surviving.counts for layer in made.layers if layer is not None} == {(20, 20)}


def test_kvcompose_without_structure_masks_by_head(model: Any) -> None:
    chosen = KvpressOptions(keep_tokens=KEPT, arguments=("structured=False",))
    made = KvpressCompressor("kvcompose", chosen).compress(view(model), CompressContext(model_reader=lambda: model))
    counts = [layer.surviving.counts for layer in made.layers if layer is not None]
    assert sum(map(sum, counts)) == 3 * 2 * KEPT
    assert len(set(counts)) > 1


@pytest.mark.parametrize("name", ["kvzip", "kvgrad"])
def test_what_is_protected_in_front_is_the_chat_prefix(model: Any, name: str) -> None:
    """kvpress never scores it, so it evicts it; here it survives, and the context loses as much as it would there."""
    context = CompressContext(model_reader=lambda: model, encoder=encode, protected=((0, 30),))
    made = KvpressCompressor(name, options(name)).compress(view(model), context)
    kept = [set(layer.surviving.head(head).tolist()) for layer in made.layers if layer is not None for head in range(2)]
    assert all(set(range(30)) <= head for head in kept)
    assert sum(len(head - set(range(4, 30))) for head in kept) == 6 * KEPT


def test_presses_that_read_again_refuse_layers_that_they_do_not_know(model: Any) -> None:
    mixed = [*descriptors(model)[:2], dataclasses.replace(descriptors(model)[2], kind="sliding", sliding_window=16)]
    rows = full_rows(model)
    prefix = PrefixView.from_tensors(mixed, [k for k, _ in rows], [v for _, v in rows], IDS)
    context = CompressContext(model_reader=lambda: model, encoder=encode)
    for name in ("kvcompose", "kvzip", "kvgrad"):
        compressor = KvpressCompressor(name, options(name))
        compressor.check_layers(descriptors(model))
        with pytest.raises(OptionError, match="does not know layer 2"):
            compressor.check_layers(mixed)
        with pytest.raises(CompressorFault, match=name):
            compressor.compress(prefix, context)
        none = [dataclasses.replace(layer, rotary_dim=0, rope_theta=None) for layer in mixed]
        compressor.check_layers(none)
        left = compressor.compress(PrefixView.from_tensors(none, [k for k, _ in rows], [v for _, v in rows], IDS), context)
        assert left.layers == (None, None, None)
    made = KvpressCompressor("dms", options("dms")).compress(prefix, context)
    assert [layer is None for layer in made.layers] == [False, False, True]


def test_a_press_that_warns_about_itself_prints_nothing() -> None:
    code = "from vericache_compressor_kvpress import KvpressCompressor as K; K('kvzip'); K('critical-kv')"
    path = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env={**os.environ, "PYTHONPATH": path})
    assert b"KVzipPress" not in done.stderr
    assert b"use_vnorm" not in done.stderr


def test_layers_whose_keys_are_not_rotated_as_presses_think_stay_uncompressed(model: Any) -> None:
    layer = descriptors(model)[0]
    compressor = KvpressCompressor("tova")
    assert compressor.supports(layer)
    assert not compressor.supports(dataclasses.replace(layer, rotary_dim=8))
    assert not compressor.supports(dataclasses.replace(layer, rotary_dim=0, rope_theta=None))
    assert not compressor.supports(dataclasses.replace(layer, kind="sliding", sliding_window=16))


@pytest.mark.parametrize("name", ["expected-attention", "tova", "knorm"])
def test_a_model_with_two_kinds_of_layers_is_compressed_where_it_attends_in_full(name: str) -> None:
    config = transformers.Gemma3TextConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=32, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    torch.manual_seed(2)
    gemma = transformers.Gemma3ForCausalLM(config).eval()
    rows = [(torch.randn(2, TOKENS, 16), torch.randn(2, TOKENS, 16)) for _ in range(2)]  # presses see those of their pass
    full = descriptors(gemma)
    layers = [dataclasses.replace(full[0], kind="sliding", sliding_window=32), full[1]]
    prefix = PrefixView.from_tensors(layers, [k for k, _ in rows], [v for _, v in rows], IDS)
    modules = [(n, *vars(module)) for n, module in gemma.named_modules()]
    made = KvpressCompressor(name, options(name)).compress(prefix, CompressContext(model_reader=lambda: gemma))
    assert made.layers[0] is None
    assert isinstance(made.layers[1], PlainLayer)
    assert made.layers[1].surviving.counts == (KEPT, KEPT)
    assert [(n, *vars(module)) for n, module in gemma.named_modules()] == modules


def test_ratios_by_layer_must_be_as_many_as_layers(model: Any) -> None:
    compressor = KvpressCompressor("per-layer", KvpressOptions(arguments=("compression_ratios=0.5:0.5",)))
    with pytest.raises(OptionError, match="2 compression_ratios for 3 layers"):
        compressor.check_layers(descriptors(model))
    KvpressCompressor("per-layer").check_layers(descriptors(model))
    even = KvpressCompressor("per-layer", KvpressOptions(keep_tokens=KEPT)).compress(
        view(model), CompressContext(model_reader=lambda: model)
    )
    assert {layer.surviving.counts for layer in even.layers if layer is not None} == {(KEPT, KEPT)}


SHORTEST = {
    "tova": 2,
    "streaming-llm": 5,
    "expected-attention": 5,
    "critical-kv": 5,
    "cap": 5,
    "leverage-score": 2,
    "compactor": 14,
    "per-layer": 5,
    "composed": 5,
    "finch": 65,
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
        start = PrefixView.from_tensors(
            descriptors(model), [k[:, :tokens] for k, _ in rows], [v[:, :tokens] for _, v in rows], IDS[:tokens]
        )
        made = compressor.compress(start, CompressContext(model_reader=lambda: model, encoder=encode))
        made.check_integrity()
        if tokens < least:
            for index, layer in enumerate(made.layers):
                assert isinstance(layer, PlainLayer)
                assert layer.surviving.counts == (tokens, tokens)
                assert torch.equal(torch.stack([layer.head(h)[0] for h in range(2)]), rows[index][0][:, :tokens])
        elif PRESSES[name].route == "rank":
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
    with pytest.raises(OptionError, match="wraps one press"):
        KvpressCompressor("ada-kv", KvpressOptions(inner="KnormPress+TOVAPress"))
    with pytest.raises(OptionError, match="does not take"):
        KvpressCompressor("per-layer", KvpressOptions(arguments=("compression_ratios=a:b",)))
    with pytest.raises(OptionError, match="does not take"):
        KvpressCompressor("tova", KvpressOptions(arguments=("wind=3",)))


@pytest.mark.parametrize(
    "name",
    [
        "kvpress-tova",
        "kvpress-ada-kv",
        "kvpress-observed-attention",
        "kvpress-expected-attention",
        "kvpress-kvgrad",
        "kvpress-kvcompose",
    ],
)
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
    with Engine(loaded, Letters(), settings, registry) as engine:
        (plain,) = engine.generate(IDS[:80], params, compressor=None, record_logits=True)
        (found,) = engine.generate(IDS[:80], params, record_logits=True)
    assert not found.metrics.degraded
    assert found.metrics.accepted > 0
    assert found.token_ids == plain.token_ids
    assert found.logits is not None
    assert plain.logits is not None
    assert torch.equal(found.logits, plain.logits)
