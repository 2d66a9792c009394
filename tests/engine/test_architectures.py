"""Every architecture: drafting changes no token, no logit bit and no KV bit, and the numbers are those of the model."""

from __future__ import annotations

import pytest
import torch

from tests.models import ARCHITECTURES, engine, full_forward_decode, model, prompt
from tests.watch import assert_same, same_rows, watching
from vericache_core.runtime.sampling_params import SamplingParams

DTYPES = (torch.float32, torch.bfloat16)
PARAMS = SamplingParams(max_new_tokens=14)
PROMPTS = (prompt(41, seed=1), prompt(7, seed=2))


def run(name: str, dtype: torch.dtype, **settings: object) -> float:
    """Compare a speculative run with a plain one of the same engine; returns the acceptance."""
    ours = engine(name, dtype, **settings)
    with ours, watching(ours) as plain:
        expected = ours.generate(PROMPTS, PARAMS, compressor=None, record_logits=True)
    with ours, watching(ours) as drafted:
        found = ours.generate(PROMPTS, PARAMS, record_logits=True)
    for mine, theirs in zip(found, expected, strict=True):
        assert_same(mine, theirs)
        assert mine.metrics.drafted
    for a, b in zip(drafted.in_order(), plain.in_order(), strict=True):
        assert same_rows(a, b)
    return sum(out.metrics.accepted for out in found) / sum(out.metrics.drafted for out in found)


@pytest.mark.parametrize("attention", ["numba", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_lossy_cache_on_the_host_tier_changes_no_bit(name: str, dtype: torch.dtype, attention: str) -> None:
    run(name, dtype, attention=attention, compressor="random", keep=0.3, full_kv="host")


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_identity_compressor_has_every_draft_accepted(name: str, dtype: torch.dtype, tier: str) -> None:
    assert run(name, dtype, full_kv=tier) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("rows", [16, 7])
@pytest.mark.parametrize("window", [1, 3, 20])
@pytest.mark.parametrize("compressor", ["random", "adversarial"])
@pytest.mark.parametrize("attention", ["numba", "reference"])
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*ARCHITECTURES, "near_tie"])
def test_the_whole_product_changes_no_bit(
    name: str, dtype: torch.dtype, tier: str, attention: str, compressor: str, window: int, rows: int
) -> None:
    ours = engine(name, dtype, full_kv=tier, attention=attention, compressor=compressor, window=window, rows=rows, fold=5)
    prompts = [prompt(length, seed=length, vocab=128) for length in (1, 18, 63)]
    expected = ours.generate(prompts, PARAMS, compressor=None, record_logits=True)
    for mine, theirs in zip(ours.generate(prompts, PARAMS, record_logits=True), expected, strict=True):
        assert_same(mine, theirs)
    ours.close()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_and_logits_are_those_of_whole_forwards(name: str) -> None:
    (out,) = engine(name, compressor="random", keep=0.5).generate(PROMPTS[0], PARAMS, record_logits=True)
    tokens, logits = full_forward_decode(model(name), PROMPTS[0], PARAMS.max_new_tokens)
    assert out.logits is not None
    assert list(out.token_ids) == tokens
    assert float((out.logits - logits).abs().max() / logits.abs().max()) < 1e-4


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tokens_are_those_of_transformers_generate(name: str) -> None:
    ours = engine(name, compressor="random", keep=0.5)
    (out,) = ours.generate(PROMPTS[0], PARAMS)
    ids = torch.tensor([PROMPTS[0]])
    theirs = model(name).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=PARAMS.max_new_tokens, do_sample=False
    )
    assert list(out.token_ids) == theirs[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "near_tie"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_probe_finds_rows_invariant(name: str, dtype: torch.dtype) -> None:
    admission = engine(name, dtype, probe=True).admission
    assert admission.identity == "bitwise"
    assert admission.probe is not None
    assert admission.probe.passed
    assert admission.probe.logits_rows > 50
