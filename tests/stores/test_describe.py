from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.models import build
from vericache_core.model.adapter import ModelAdapter
from vericache_core.stores import describe
from vericache_core.stores.describe import code_digest, config_digest, describe_model, layout, numerics, weights_digest
from vericache_core.stores.identity import PrefixIdentity


def describe_llama(tokenizer: Any = None, attention: str = "reference", rows: int = 16, **changes: Any) -> PrefixIdentity:
    return describe_model(ModelAdapter(build("llama", **changes), rows), tokenizer, attention)


def differing(a: PrefixIdentity, b: PrefixIdentity) -> set[str]:
    return {name for name, value in asdict(a).items() if asdict(b)[name] != value}


def test_the_same_model_built_twice_has_one_identity() -> None:
    assert describe_llama() == describe_llama()


@pytest.mark.fault("identity", "each change of a loaded model")
@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"seed": 1}, {"weights"}),
        ({"dtype": torch.bfloat16}, {"weights", "dtype"}),
        ({"rms_norm_eps": 1e-3}, {"config"}),
        ({"hidden_act": "gelu"}, {"config", "numerics"}),  # such a layer is not fused
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, {"weights", "rotary"}),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, {"weights", "rotary"}),
        ({"attention": "numba"}, {"numerics"}),
        ({"rows": 8}, {"numerics"}),
        ({"tokenizer": SimpleNamespace(get_vocab=lambda: {"a": 0}, special_tokens_map={})}, {"tokenizer"}),
    ],
)
def test_each_change_of_a_model_is_seen(changes: dict[str, Any], fields: set[str]) -> None:
    assert differing(describe_llama(), describe_llama(**changes)) == fields


def test_layout_tells_windows_and_widths_apart() -> None:
    llama, gemma = (ModelAdapter(build(name), 16).layers for name in ("llama", "gemma3"))
    wider = tuple(replace(layer, sliding_window=9) if layer.sliding_window else layer for layer in gemma)
    scaled = tuple(replace(layer, scaling=layer.scaling * 1.0000001) for layer in llama)
    assert len({layout(layers) for layers in (llama, gemma, wider, scaled)}) == 4


def test_weights_are_hashed_once_and_again_when_one_was_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    hashed, real = [], describe._hash

    def count(block: torch.Tensor) -> bytes:
        hashed.append(block.nbytes)
        return real(block)

    monkeypatch.setattr(describe, "_hash", count)
    first = weights_digest(model)
    blocks = len(hashed)
    assert blocks > 10
    assert weights_digest(model) == first
    assert len(hashed) == blocks
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    assert weights_digest(model) != first
    assert len(hashed) == 2 * blocks


def test_every_block_of_a_large_tensor_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(describe, "BLOCK", 64)
    layer = torch.nn.Linear(40, 3)
    seen = {weights_digest(layer)}
    for at in range(0, 120, 7):
        with torch.no_grad():
            layer.weight.view(-1)[at] += 1
        seen.add(weights_digest(layer))
    assert len(seen) == 1 + len(range(0, 120, 7))


def test_threads_and_precision_are_part_of_the_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = ModelAdapter(build("llama"), 16)
    before = numerics(adapter, "reference")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX9")
    monkeypatch.setattr(torch, "__version__", "9.9")
    after = numerics(adapter, "reference")
    assert {name for name, value in before.items() if after[name] != value} == {"threads", "cpu", "torch"}


def test_rotary_frequencies_that_are_never_saved_count() -> None:
    model = build("llama")
    before = weights_digest(model)
    model.model.rotary_emb.inv_freq.mul_(2)
    assert weights_digest(model) != before


def test_what_changes_no_row_is_left_out_of_the_configuration() -> None:
    model = build("llama")
    before = config_digest(model)
    model.config.use_cache = not model.config.use_cache
    model.config._name_or_path = "elsewhere"
    assert config_digest(model) == before


def test_the_identity_is_the_same_in_another_process() -> None:
    script = (
        "import torch; torch.set_num_threads(1)\n"
        "from tests.stores.test_describe import describe_llama\n"
        "print(describe_llama().root.hex(), end='')"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == describe_llama().root.hex()


def test_the_code_digest_covers_the_kernels() -> None:
    assert len(code_digest()) == 32
