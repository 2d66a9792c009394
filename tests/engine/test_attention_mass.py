"""Column sums of the prompt's attention: what they are, and that gathering them swaps nothing in twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.faulty import spec
from tests.models import build, engine_over, prompt
from vericache_core.builtin import IdentityCompressor
from vericache_core.cache.pages import PAGE
from vericache_core.context import CompressContext, Needs
from vericache_core.engine import Engine
from vericache_core.kv import LayerDescriptor
from vericache_core.runtime.sampling_params import SamplingParams

PROMPT = prompt(PAGE + 21, seed=4)


def looking(seen: dict[int, Tensor], needs: Needs, full_kv: str, name: str = "llama") -> Engine:
    """An engine whose compressor keeps everything, and puts the mass it is shown into ``seen``."""

    class Looking(IdentityCompressor):
        name = "looking"

        @property
        def needs(self) -> Needs:
            return needs

        def score(self, layer: LayerDescriptor, keys: Tensor, values: Tensor, context: CompressContext) -> Tensor:
            if needs.attention_mass:
                seen[layer.index] = context.attention_mass(layer.index)
            return super().score(layer, keys, values, context)

    return engine_over(build(name), specs=[spec("looking", Looking)], compressor="looking", full_kv=full_kv)


@pytest.mark.parametrize("full_kv", ["device", "host", "disk"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_it_is_the_column_sum_of_the_attention_of_transformers(name: str, full_kv: str) -> None:
    seen: dict[int, Tensor] = {}
    looking(seen, Needs(attention_mass=True), full_kv, name).generate(PROMPT, SamplingParams(max_new_tokens=2))
    reference: Any = build(name)
    reference.set_attn_implementation("eager")
    with torch.no_grad():
        paid = reference(torch.tensor([PROMPT]), output_attentions=True).attentions
    assert sorted(seen) == ([2] if name == "gemma3" else [0, 1, 2])  # sliding layers are not offered
    for layer, mass in seen.items():
        assert mass.dtype == torch.float32
        torch.testing.assert_close(mass, paid[layer][0].sum(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("full_kv", ["host", "disk"])
def test_gathering_it_moves_no_row_twice_and_holds_no_slot_more(full_kv: str) -> None:
    moved, peaks = [], []
    for needs in (Needs(), Needs(attention_mass=True)):
        (out,) = looking({}, needs, full_kv).generate(PROMPT, SamplingParams(max_new_tokens=2))
        moved.append(out.metrics.swap_bytes)
        peaks.append(out.metrics.peak_device_kv_bytes)
    assert moved[0] > 0
    assert moved[1] == moved[0]
    assert peaks[1] == peaks[0]
