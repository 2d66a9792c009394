"""Fused decoder layers: the kernels against torch, and which layers are fused, and that nothing else changes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models import build, engine, prompt
from vericache_core import SamplingParams
from vericache_core.attention.numba_panels import FORMS
from vericache_core.model import numba_rows, rows_reference
from vericache_core.model.adapter import ModelAdapter
from vericache_core.model.fused import FusedLayer, largest_difference, recognised
from vericache_core.model.probe import shape_failures
from vericache_core.runtime.backend import choose_attention

DTYPES = [torch.float32, torch.bfloat16]
FUSED, OTHERS = ("llama", "mistral", "qwen2", "qwen3"), ("gemma3", "gpt2", "phi3")
EPS = 1e-5
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
"""Relative; in bfloat16 one step of the dtype, where a float32 sum in another order rounds the other way."""
attend = choose_attention("auto", torch.device("cpu"))[1]


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def varied(name: str, dtype: torch.dtype) -> Any:
    """A model whose norms and biases are not the ones and zeros that they begin with."""
    model = build(name, dtype)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            if parameter.dim() == 1:
                parameter.add_(drawn(len(parameter), dtype=dtype, seed=number, scale=0.3))
    return model


def shares(rows: Tensor) -> int:
    return numba_rows.threads_for(len(rows))


def norm(rows: Tensor, weight: Tensor) -> Tensor:
    result = torch.empty_like(rows)
    addresses = (weight.data_ptr(), rows.data_ptr(), result.data_ptr())
    numba_rows.norm_rows(FORMS[rows.dtype], len(rows), rows.shape[1], np.float32(EPS), *addresses, shares(rows))
    return result


def add_norm(one: Tensor, other: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total, result = torch.empty_like(one), torch.empty_like(one)
    addresses = [part.data_ptr() for part in (weight, one, other, total, result)]
    numba_rows.add_norm_rows(FORMS[one.dtype], len(one), one.shape[1], np.float32(EPS), *addresses, shares(one))
    return total, result


def gate(rows: Tensor) -> Tensor:
    width = rows.shape[1] // 2
    result = rows.new_empty((len(rows), width))
    numba_rows.gate_rows(FORMS[rows.dtype], len(rows), width, rows.data_ptr(), result.data_ptr(), shares(rows))
    return result


def rotate(joint: Tensor, cos: Tensor, sin: Tensor, heads: int, norms: tuple[Tensor, ...] = ()) -> list[Tensor]:
    rows, width = cos.shape
    kv_heads = (joint.shape[1] // width - heads) // 2
    results = [joint.new_empty((rows, count, width)) for count in (heads, kv_heads, kv_heads)]
    numba_rows.rotate_rows(
        *(FORMS[joint.dtype], rows, (heads, kv_heads, width), (cos.data_ptr(), sin.data_ptr())),
        *((norms[0].data_ptr(), norms[1].data_ptr()) if norms else (0, 0), np.float32(EPS)),
        *(joint.data_ptr(), tuple(part.data_ptr() for part in results), shares(cos)),
    )
    return results


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 15, 63, 64, 100, 576])
def test_norms_and_sums_are_those_of_torch(dtype: torch.dtype, width: int) -> None:
    one, other = (drawn(7, width, dtype=dtype, seed=seed, scale=3) for seed in (1, 2))
    weight = drawn(width, dtype=dtype, seed=3)
    torch.testing.assert_close(norm(one, weight), rows_reference.norm(one, weight, EPS), rtol=CLOSE[dtype], atol=0)
    total, result = add_norm(one, other, weight)
    assert torch.equal(total, one + other)
    assert torch.equal(result, norm(total, weight))
    numba_rows.add_rows(FORMS[dtype], 7, width, one.data_ptr(), other.data_ptr(), shares(one))
    assert torch.equal(one, total)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [0.01, 1, 30, 1000])
def test_gates_are_those_of_torch(dtype: torch.dtype, scale: float) -> None:
    rows = drawn(5, 2 * 333, dtype=dtype, scale=scale)
    torch.testing.assert_close(gate(rows), rows_reference.gate(rows), rtol=2 * CLOSE[dtype], atol=1e-36)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_has_the_bits_of_torch(dtype: torch.dtype) -> None:
    joint, cos, sin = (drawn(5, width, dtype=dtype, seed=width) for width in (14 * 16, 16, 16))
    heads = joint.view(5, 14, 16)
    query, key, value = rotate(joint, cos, sin, 10)
    assert torch.equal(query, rows_reference.rotate(heads[:, :10], cos, sin))
    assert torch.equal(key, rows_reference.rotate(heads[:, 10:12], cos, sin))
    assert torch.equal(value, heads[:, 12:])
    weights = tuple(drawn(16, dtype=dtype, seed=seed) for seed in (1, 2))
    query, key, _ = rotate(joint, cos, sin, 10, weights)
    for found, part, weight in ((query, heads[:, :10], weights[0]), (key, heads[:, 10:12], weights[1])):
        normed = norm(part.reshape(-1, 16).contiguous(), weight).view(part.shape)
        assert torch.equal(found, rows_reference.rotate(normed, cos, sin))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_a_number_stays_so_and_in_its_row(dtype: torch.dtype) -> None:
    rows, weight = drawn(3, 64, dtype=dtype), torch.ones(64, dtype=dtype)
    rows[1, 5] = float("nan")
    for result in (norm(rows, weight), gate(rows), *add_norm(rows, rows, weight)):
        assert result[1].isnan().any()
        assert result[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_alone_and_in_company(dtype: torch.dtype) -> None:
    rows, weight = drawn(130, 200, dtype=dtype), drawn(200, dtype=dtype, seed=1)
    functions: list[Callable[[Tensor], Tensor]] = [lambda x: norm(x, weight), gate, lambda x: add_norm(x, x, weight)[1]]
    for function in functions:
        whole = function(rows)
        for index in (0, 1, 64, 129):
            assert torch.equal(function(rows[index : index + 1].contiguous())[0], whole[index])
    cos, sin = (drawn(130, 20, dtype=dtype, seed=seed) for seed in (2, 3))
    turned = rotate(rows, cos, sin, 4)
    for index in (0, 1, 64, 129):
        row, own_cos, own_sin = (part[index : index + 1].contiguous() for part in (rows, cos, sin))
        alone = rotate(row, own_cos, own_sin, 4)
        assert all(torch.equal(one[0], many[index]) for one, many in zip(alone, turned, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_known_layers_are_fused_and_answer_as_before(name: str, dtype: torch.dtype) -> None:
    model = varied(name, dtype)
    with_forms, without = ModelAdapter(model, 16), ModelAdapter(model, 16, fuse="never")
    assert (with_forms.fused_layers, without.fused_layers) == (3, 0)
    assert with_forms.packed_bytes == without.packed_bytes
    assert [layer.sliding_window for layer in with_forms.layers] == [layer.sliding_window for layer in without.layers]
    for layer in model.model.layers:
        for pack in (True, False):
            assert largest_difference(layer, FusedLayer(layer, pack, 16)) <= {torch.float32: 3e-6, torch.bfloat16: 2**-7}[dtype]
    assert not shape_failures(with_forms, attend, (64, 4))


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_keep_their_modules(name: str) -> None:
    assert ModelAdapter(build(name), 16).fused_layers == 0


def test_layers_that_somebody_changed_keep_their_modules() -> None:
    model = build("llama")
    layers = model.model.layers
    layers[0].mlp.register_forward_hook(lambda *_: None)
    layers[1].self_attn.o_proj.forward = lambda rows: rows
    assert [recognised(layer) for layer in layers] == [False, False, True]

    class Own(type(layers[2])):  # type: ignore[misc]
        pass

    layers[2].__class__ = Own
    assert not recognised(layers[2])
    assert not recognised(build("llama", hidden_act="gelu").model.layers[0])


def test_a_form_that_differs_is_refused_and_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    right = numba_rows.gate_rows

    def wrong(form: int, rows: int, width: int, source: int, target: int, threads: int) -> None:
        right(form, rows, width, source + 4, target, threads)

    monkeypatch.setattr(numba_rows, "gate_rows", wrong)
    with caplog.at_level(logging.WARNING, "vericache.model"):
        assert ModelAdapter(build("llama"), 16).fused_layers == 0
    assert "decoder layers run as they are: the fused form of layer 0 differs by" in caplog.text


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_fused_model_answers_as_before_outside_of_steps(dtype: torch.dtype) -> None:
    model, ids = varied("llama", dtype), torch.tensor([list(range(5, 60))])
    with torch.inference_mode():
        before = model(ids).logits
        assert ModelAdapter(model, 16).fused_layers
        assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("name", FUSED)
def test_tokens_are_those_of_the_modules(name: str) -> None:
    outputs = []
    for fuse in ("auto", "never"):
        with engine(name, torch.float32, fuse=fuse) as ours:
            outputs.append(ours.generate(prompt(200), SamplingParams(max_new_tokens=24))[0].token_ids)
    assert outputs[0] == outputs[1]
