"""Dropped, then quantized: the draft KV holds codes of a subset, and the output is that of the full KV."""

from __future__ import annotations

import pytest

from tests.engine.faulty import spec
from tests.models import engine_over, model, prompt
from tests.sdk.making import NormDropper, RoundQuantizer
from tests.watch import assert_same, same_rows, watching
from vericache_core.builtin import IdentityOptions
from vericache_core.chain import ChainCompressor
from vericache_core.plugins.options import Budget
from vericache_core.plugins.spec import API_VERSION, CompressorSpec
from vericache_core.runtime.sampling_params import SamplingParams

PROMPT = prompt(40, seed=3)
ROUND = CompressorSpec("round", lambda _: RoundQuantizer(unit=2, residual=4), IdentityOptions, "quantization", API_VERSION)


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_no_bit_changes_and_drafts_are_accepted(architecture: str, tier: str) -> None:
    specs = [spec("norm", NormDropper, Budget), ROUND]
    ours = engine_over(model(architecture), specs=specs, compressor="norm+round", keep=0.9, full_kv=tier, fold=4, window=5)
    params = SamplingParams(max_new_tokens=30)
    with watching(ours) as plain:
        (expected,) = ours.generate(PROMPT, params, compressor=None, record_logits=True)
    with watching(ours) as drafted:
        (found,) = ours.generate(PROMPT, params, record_logits=True)
    assert_same(found, expected)
    assert same_rows(drafted.in_order()[0], plain.in_order()[0])
    assert not found.metrics.degraded
    assert found.metrics.accepted > 0
    assert found.metrics.compressed_kv_bytes < found.metrics.compressed_from_bytes


def test_keeping_everything_exactly_accepts_every_draft() -> None:
    """With nothing dropped and a residual longer than the prompt the drafter sees the very rows."""
    whole = CompressorSpec("whole", lambda _: RoundQuantizer(residual=1000), IdentityOptions, "quantization", API_VERSION)
    ours = engine_over(model("llama"), specs=[whole], compressor="identity+whole", fold=4)
    (found,) = ours.generate(PROMPT, SamplingParams(max_new_tokens=30))
    assert isinstance(ours.compressors.configured("identity+whole"), ChainCompressor)
    assert found.metrics.acceptance == 1
