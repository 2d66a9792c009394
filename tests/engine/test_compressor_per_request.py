"""Requests of one batch may each have a compressor of their own."""

from __future__ import annotations

import pytest
import torch

from tests.models import engine, prompt
from vericache_core.errors import ConfigError
from vericache_core.runtime.sampling_params import SamplingParams


def test_each_request_drafts_with_its_own_and_all_match_plain() -> None:
    prompts = [prompt(length, seed=length) for length in (40, 61, 23, 50)]
    params = SamplingParams(max_new_tokens=16, ignore_eos=True)
    with engine() as shared:
        plain = shared.generate(prompts, params, compressor=None, record_logits=True)
        mixed = shared.generate(prompts, params, compressor=["identity", None, "adversarial", "random"], record_logits=True)
    assert [output.metrics.compressor for output in mixed] == ["identity", None, "adversarial", "random"]
    assert mixed[0].metrics.acceptance == 1.0
    assert mixed[1].metrics.drafted == 0
    for mine, theirs in zip(mixed, plain, strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.logits is not None
        assert theirs.logits is not None
        assert torch.equal(mine.logits, theirs.logits)


def test_a_wrong_number_of_compressors_is_refused() -> None:
    with engine() as shared, pytest.raises(ConfigError, match="2 prompts but 1 compressors"):
        shared.generate([prompt(5), prompt(6)], compressor=["identity"])
