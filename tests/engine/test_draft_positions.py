"""After eviction a drafted token keeps its logical position: the draft equals the full cache with the evicted keys masked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.faulty import spec
from tests.models import engine_over, model, prompt
from vericache_core.builtin import IdentityCompressor, IdentityOptions
from vericache_core.compressor import TokenDropCompressor
from vericache_core.context import CompressContext
from vericache_core.kv import LayerDescriptor
from vericache_core.plugins.options import Budget
from vericache_core.runtime.request import Request
from vericache_core.runtime.sampling_params import SamplingParams

PROMPT = prompt(64, seed=6)


class Odd(TokenDropCompressor):
    """Keeps the odd positions of every head."""

    name = "odd"

    def score(self, layer: LayerDescriptor, keys: Tensor, values: Tensor, context: CompressContext) -> Tensor:
        return (torch.arange(keys.shape[1]) % 2).float().expand(keys.shape[:2])


@torch.no_grad()
def masked_forward(loaded: Any, ids: list[int], prefix: int, exact: int) -> Tensor:
    """Last logits row of one eager forward in which rows from ``exact`` on do not see the even prefix positions."""
    size = len(ids)
    seen = torch.ones(size, size).tril().bool()
    seen[exact:, :prefix:2] = False
    mask = torch.zeros(1, 1, size, size).masked_fill(~seen, torch.finfo(torch.float32).min)
    used = loaded.config._attn_implementation
    loaded.set_attn_implementation("eager")
    try:
        logits: Tensor = loaded(input_ids=torch.tensor([ids]), attention_mask=mask).logits[0, -1]
    finally:
        loaded.set_attn_implementation(used)
    return logits


@pytest.mark.parametrize("attention", ["numba", "reference"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "qwen3"])
def test_a_draft_is_the_full_cache_with_the_evicted_keys_masked(
    name: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2 has absolute positions, so that even a uniform shift would show. Rows of the tail are the verifier's."""
    drafted: list[tuple[list[int], int, Tensor]] = []
    original = Request.take_draft

    def noting(self: Request, logits: Tensor) -> None:
        drafted.append(([*self.tokens, *self.drafts], self.full.tokens, logits.clone()))
        original(self, logits)

    monkeypatch.setattr(Request, "take_draft", noting)
    loaded = model(name)
    specs = [spec("odd", lambda options: Odd(Budget(keep=0.5)))]
    ours = engine_over(loaded, specs=specs, compressor="odd", attention=attention)
    (out,) = ours.generate(PROMPT, SamplingParams(max_new_tokens=16))
    assert out.metrics.rounds > 2
    assert len(drafted) > 8
    for ids, exact, logits in drafted:
        expected = masked_forward(loaded, ids, len(PROMPT), exact)
        assert float((logits - expected).abs().max() / expected.abs().max()) < 1e-4


def test_the_draft_cache_is_as_long_as_the_full_one_after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft, full and committed lengths agree, the newest token excepted, which has no row yet."""
    specs = [spec("own", lambda options: IdentityCompressor(IdentityOptions()))]
    ours = engine_over(model("gpt2"), specs=specs, compressor="own", window=3)
    step, checked = ours.loop.step, [0]

    def looking() -> list[Request]:
        done = step()
        for request in ours.loop.requests:
            if request.draft is not None:
                checked[0] += 1
                assert request.draft.tokens - request.draft.drafted == request.full.tokens == len(request.tokens) - 1
                for index in request.draft.compressed_layers():
                    pages = request.draft.layer(index)[0]
                    ours_rows, full_rows = pages.rows(0, request.full.tokens), request.full.read(index, 0, request.full.tokens)
                    assert all(torch.equal(a, b) for a, b in zip(ours_rows, full_rows, strict=True))
        return done

    monkeypatch.setattr(ours.loop, "step", looking)
    (out,) = ours.generate(prompt(30), SamplingParams(max_new_tokens=200))
    assert out.metrics.acceptance == 1.0
    assert checked[0] > 190
