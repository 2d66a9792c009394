"""Steps of several row counts: only where the probe finds the same bits, and then nothing else changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import build
from tests.watch import assert_same
from vericache_core import Engine, EngineConfig, SamplingParams
from vericache_core.attention.paged import attend_reference
from vericache_core.model.adapter import ModelAdapter
from vericache_core.model.admission import admit
from vericache_core.model.packed import AUTO_BYTES, pack_linears
from vericache_core.runtime.backend import choose_attention

CPU = torch.device("cpu")


def attend_well(*arguments: Any) -> Tensor:
    return choose_attention("auto", CPU)[1](*arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compressor", [None, "random"])
def test_output_is_the_same_in_one_shape_and_in_many(dtype: torch.dtype, compressor: str | None) -> None:
    outputs, steps = [], []
    for shapes in ("one", "auto"):
        with Engine(build("llama", dtype), config=EngineConfig(rows=16, shapes=shapes, window=5, mode="pinned")) as engine:
            assert engine.adapter.shapes == ((16,) if shapes == "one" else engine.admission.shapes)
            prompts = [list(range(1, 150)), list(range(3, 80))]
            outputs.append(
                engine.generate(prompts, SamplingParams(max_new_tokens=20), compressor=compressor, record_logits=True)
            )
            steps.append(engine.loop.steps)
    for one, many in zip(*outputs, strict=True):
        assert_same(many, one)
    assert steps[1] < steps[0]  # else the larger shape was never used


def test_a_shape_with_other_bits_is_refused_and_never_run() -> None:
    adapter = ModelAdapter(build("llama"), 16)
    seen: list[int] = []

    def uneven(query: Tensor, *rest: Any) -> Tensor:
        seen.append(len(query))
        output = attend_well(query, *rest)
        return output * (1 + 2.0**-20) if len(query) == 64 else output

    admission = admit(adapter, uneven, "bitwise", True, (4, 64))
    assert adapter.shapes == admission.shapes == (4, 16)
    assert "64 rows" in admission.refused_shapes[64]
    seen.clear()
    with pytest.raises(ValueError, match="do not fit in a step of 16"):
        adapter.step([0] * 17, [0] * 17, None)  # type: ignore[arg-type]
    assert not seen


def test_one_row_among_many_is_enough_to_refuse_a_shape() -> None:
    adapter = ModelAdapter(build("llama"), 16)

    def uneven(query: Tensor, *rest: Any) -> Tensor:
        output = attend_well(query, *rest)
        if len(query) == 64:
            output[63] *= 1 + 2.0**-20
        return output

    assert admit(adapter, uneven, "bitwise", True, (64,)).shapes == (16,)


def test_without_the_probe_there_is_one_shape() -> None:
    adapter = ModelAdapter(build("llama"), 16)
    assert admit(adapter, attend_reference, "bitwise", False, (4, 64)).shapes == (16,)


def test_a_packed_model_answers_as_before_outside_of_steps() -> None:
    model = build("llama", torch.bfloat16)
    ids = torch.tensor([list(range(5, 60))])
    with torch.inference_mode():
        before = model(ids).logits
        assert ModelAdapter(model, 16, "always").packed_bytes > 0
        assert torch.equal(model(ids).logits, before)


def test_packing_follows_size_and_wish() -> None:
    small = torch.nn.Sequential(torch.nn.Linear(8, 8))
    assert list(pack_linears(small, 16, "auto")) == [small[0]]
    assert not pack_linears(small, 16, "never")
    large = torch.nn.Sequential(torch.nn.Linear(8, 8))
    large[0].weight = torch.nn.Parameter(torch.empty(1, 8).expand(AUTO_BYTES // 32 + 1, 8))
    assert not pack_linears(large, 16, "auto")


def test_packed_weights_belong_to_one_adapter() -> None:
    """Another engine over the same model, and a copy of the model, compute with weights of their own."""
    model = build("llama")
    packed = ModelAdapter(model, 16, "always")
    plain = ModelAdapter(model, 16, "never")
    assert packed.packed_bytes > 0
    assert plain.packed_bytes == 0
    twin = copy.deepcopy(model)
    ids = torch.tensor([list(range(5, 60))])
    with torch.inference_mode():
        before = twin(ids).logits
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(twin(ids).logits, before)
        assert not model(ids).logits.any()
