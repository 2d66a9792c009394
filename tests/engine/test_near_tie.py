"""A model whose best two tokens differ by less than rounding: one-forward verification flips, ours does not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.drafters import AntiOracle, Drafter, Noisy, Oracle, References, Scripted, drafting
from tests.models import build, engine, engine_over, model, prompt
from tests.watch import assert_same
from vericache_core.outputs import RequestOutput
from vericache_core.runtime.sampling_params import SamplingParams

TOKENS = 44
PARAMS = SamplingParams(max_new_tokens=TOKENS)
PROMPTS = tuple(prompt(length, seed=length, vocab=128) for length in (5, 23, 40))
DTYPES = (torch.float32, torch.bfloat16)


@functools.cache
def plain(dtype: torch.dtype) -> list[RequestOutput]:
    return engine("near_tie", dtype).generate(PROMPTS, PARAMS, compressor=None, record_logits=True)


def references(dtype: torch.dtype) -> References:
    return {out.prompt_token_ids: out.token_ids for out in plain(dtype)}


DRAFTERS: dict[str, Callable[[References], Drafter]] = {
    "oracle": lambda refs: Oracle(refs, 128),
    "anti-oracle": lambda refs: AntiOracle(refs, 128),
    "noisy": lambda refs: Noisy(refs, 128),
    "scripted": lambda refs: Scripted(refs, 128, (0, 1, 3, 8, 2)),
}


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("window", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_drafter_flips_a_tie(dtype: torch.dtype, window: int, kind: str) -> None:
    drafter = DRAFTERS[kind](references(dtype))
    with drafting(drafter):
        found = engine("near_tie", dtype, window=window).generate(PROMPTS, PARAMS, record_logits=True)
    for mine, theirs in zip(found, plain(dtype), strict=True):
        assert_same(mine, theirs)
    accepted = sum(out.metrics.accepted for out in found)
    assert {"oracle": accepted == sum(out.metrics.drafted for out in found), "anti-oracle": accepted == 0}.get(kind, True)
    assert found[0].metrics.drafted > 10


@torch.no_grad()
def one_forward_flips(loaded: Any, ids: list[int], tokens: int, width: int) -> int:
    """Tokens that a verifier gets wrong which checks ``width`` of its own model's tokens in one SDPA forward."""
    from transformers import DynamicCache

    loaded.set_attn_implementation("sdpa")
    cache, sequence, rows = DynamicCache(), list(ids), []
    loaded(input_ids=torch.tensor([ids[:-1]]), past_key_values=cache)
    for _ in range(tokens):
        row = loaded(input_ids=torch.tensor([sequence[-1:]]), past_key_values=cache).logits[0, -1]
        sequence.append(int(row.argmax()))
        rows.append(row)
    cache, flips = DynamicCache(), 0
    loaded(input_ids=torch.tensor([ids[:-1]]), past_key_values=cache)
    for start in range(len(ids) - 1, len(sequence) - 1, width):
        block = sequence[start : start + width]
        verified = loaded(input_ids=torch.tensor([block]), past_key_values=cache).logits[0].argmax(-1)
        right = sequence[start + 1 : start + 1 + len(block)]
        flips += sum(int(a) != b for a, b in zip(verified, right, strict=False))
    return flips


def test_a_plain_one_forward_verifier_fails_here() -> None:
    """Without this, the tests above would show nothing."""
    loaded = build("near_tie")
    assert sum(one_forward_flips(loaded, ids, TOKENS, 5) for ids in PROMPTS) > 5


def tied(dtype: torch.dtype, same: tuple[int, ...]) -> Any:
    """A model where each row of logits holds one value at ``same`` and its negative everywhere else."""
    loaded = build("llama", dtype)
    with torch.no_grad():
        head = loaded.lm_head.weight
        head.copy_(-head[7:8])
        head[list(same)] *= -1
    return loaded


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("same", [(0, 511), (3, 5, 9), (200, 400, 510)])
def test_exact_ties_go_to_the_lowest_id_however_they_are_decided(dtype: torch.dtype, same: tuple[int, ...]) -> None:
    ours = engine_over(tied(dtype, same))
    (one,) = ours.generate(prompt(9), PARAMS, compressor=None, record_logits=True)
    (two,) = ours.generate(prompt(9), PARAMS, record_logits=True)
    assert_same(two, one)
    assert two.metrics.acceptance == 1.0  # the drafts break ties alike
    processed = SamplingParams(max_new_tokens=TOKENS, logits_processors=(lambda prefix, logits: logits,))
    (three,) = ours.generate(prompt(9), processed)
    assert three.token_ids == one.token_ids
    assert one.logits is not None
    best = [torch.nonzero(row == row.max()).flatten().tolist() for row in one.logits]
    assert min(map(len, best)) >= len(same)
    assert list(one.token_ids) == [ids[0] for ids in best]


@torch.no_grad()
def test_the_model_is_what_it_claims() -> None:
    logits = model("near_tie")(input_ids=torch.tensor([PROMPTS[0]])).logits[0]
    top = logits.topk(2, -1).values
    assert float((top[:, 0] - top[:, 1]).max()) < 1e-4
