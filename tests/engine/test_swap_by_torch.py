"""Swapping with torch's own copies, as on a device that Numba does not reach: the swap thread writes to pages that
a step, which runs in inference mode, asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import engine, prompt
from tests.sdk.making import descriptor
from tests.watch import assert_same
from vericache_core.cache.pages import PAGE, Extent
from vericache_core.runtime.sampling_params import SamplingParams


def copy_by_torch(source: Tensor, target: Tensor) -> None:
    target.copy_(source, non_blocking=True)


@pytest.mark.parametrize("compressor", ["random", "adversarial"])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_no_bit_changes(tier: str, compressor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vericache_core.cache.move.HAVE_NUMBA", False)
    monkeypatch.setattr("vericache_core.cache.tiers._copy", copy_by_torch)
    settings: dict[str, Any] = {"keep": 0.4} if compressor == "random" else {}
    params = SamplingParams(max_new_tokens=12)
    prompts = [prompt(PAGE + 9, seed=1), prompt(30, seed=2)]
    with engine("llama", attention="reference", full_kv=tier, compressor=compressor, **settings) as ours:
        expected = ours.generate(prompts, params, compressor=None, record_logits=True)
        found = ours.generate(prompts, params, record_logits=True)
    for mine, theirs in zip(found, expected, strict=True):
        assert_same(mine, theirs)
        assert mine.metrics.swap_bytes
        assert not mine.metrics.degraded


def test_pages_asked_for_in_inference_mode_can_be_written_outside_of_it() -> None:
    with torch.inference_mode():
        extent = Extent.allocate(descriptor(), 1, torch.device("cpu"))
    extent.keys.zero_()
    assert not extent.keys.is_inference()
