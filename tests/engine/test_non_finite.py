"""NaN: in the model's logits it ends the request it belongs to, in a draft it is a bad proposal and nothing more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import build, engine, engine_over, prompt
from tests.watch import assert_same
from vericache_core.errors import NonFiniteError
from vericache_core.runtime.sampling_params import SamplingParams

POISON = 500
"""A token id whose embedding is NaN."""


def poisoned() -> Any:
    loaded = build("llama")
    with torch.no_grad():
        loaded.model.embed_tokens.weight[POISON] = float("nan")
    return loaded


PARAMS = SamplingParams(max_new_tokens=15, bad_words=((POISON,),))


@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("attention", ["numba", "reference"])
def test_nan_in_a_prompt_ends_that_request_only(attention: str, tier: str) -> None:
    """Its KV rows are NaN too; pages and steps are shared in turn by the others."""
    ours = engine_over(poisoned(), attention=attention, full_kv=tier, compressor="random", keep=0.5)
    clean = [token % POISON for token in prompt(33)]
    bad = [*clean[:12], POISON, *clean[12:20]]
    (expected,) = ours.generate(clean, PARAMS, compressor=None, record_logits=True)
    first, second, third = ours.generate([bad, clean, [POISON]], PARAMS, record_logits=True)
    assert_same(second, expected)
    for out in (first, third):
        assert isinstance(out.error, NonFiniteError)
        assert out.finish_reason == "error"
        assert out.token_ids == ()
    (again,) = ours.generate(clean, PARAMS, record_logits=True)  # over memory that held NaN
    assert_same(again, expected)


def drafting(ours: Any) -> bool:
    request = ours.loop.requests[0]
    return request.draft is not None and not request.verifying


def test_nan_in_a_draft_is_rejected() -> None:
    ours = engine("llama", compressor="identity")
    (expected,) = ours.generate(prompt(20), SamplingParams(max_new_tokens=20), compressor=None)
    attend, original = ours.loop._attend, ours.loop._attend

    def spoiling(query: Tensor, keys: Tensor, values: Tensor, jobs: Any, scaling: float) -> Tensor:
        output: Tensor = attend(query, keys, values, jobs, scaling)
        return output * float("nan") if len(jobs) == 1 and drafting(ours) else output

    ours.loop._attend = spoiling
    try:
        (found,) = ours.generate(prompt(20), SamplingParams(max_new_tokens=20))
    finally:
        ours.loop._attend = original
    assert found.token_ids == expected.token_ids
    assert found.metrics.drafted
    assert found.metrics.accepted == 0


def generated_into(loaded: Any, at: int) -> Callable[..., None]:
    """A hook that makes the logits NaN when the row for position ``at`` is computed."""

    def hook(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        rows = (kwargs["position_ids"][0] == at).nonzero().flatten()
        if output.logits.shape[1] > 1:
            output.logits[0, rows] = float("nan")

    handle = loaded.register_forward_hook(hook, with_kwargs=True)
    remove: Callable[..., None] = handle.remove
    return remove


@pytest.mark.parametrize("at", [20, 24, 29])
def test_nan_during_decoding_keeps_the_tokens_before_it(at: int) -> None:
    loaded = build("llama")
    ours = engine_over(loaded)
    (expected,) = ours.generate(prompt(20), SamplingParams(max_new_tokens=20), compressor=None)
    remove = generated_into(loaded, at)
    (found,) = ours.generate(prompt(20), SamplingParams(max_new_tokens=20))
    (plain,) = ours.generate(prompt(20), SamplingParams(max_new_tokens=20), compressor=None)
    remove()
    for out in (found, plain):
        assert isinstance(out.error, NonFiniteError)
        assert out.token_ids == expected.token_ids[: at - 19]
