"""Verified tokens are taken into the compressed prefix while the request runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.drafters import AntiOracle, Scripted, drafting
from tests.engine.faulty import spec
from tests.models import VOCAB, engine_over, model, prompt
from tests.sdk.making import NormDropper, RoundQuantizer
from tests.watch import assert_same, same_rows, watching
from vericache_core.builtin import IdentityOptions
from vericache_core.context import CompressContext
from vericache_core.engine import Engine
from vericache_core.kv import CompressedKV, PlainLayer, PrefixView
from vericache_core.plugins.options import Budget
from vericache_core.runtime.request import Request
from vericache_core.runtime.sampling_params import SamplingParams

LONG, SHORT = SamplingParams(max_new_tokens=60), SamplingParams(max_new_tokens=25)
PROMPT = prompt(22, seed=5)


class Redropper(NormDropper):
    """Drops again from what it kept whenever it is extended, so the draft KV is built anew from the full KV."""

    def extend(self, compressed: CompressedKV, rows: PrefixView, context: CompressContext) -> CompressedKV:
        grown = super().extend(compressed, rows, context)
        layers = []
        for layer in grown.layers:
            if not isinstance(layer, PlainLayer):
                layers.append(layer)
                continue
            heads = [layer.surviving.head(h)[-9:] for h in range(layer.surviving.kv_heads)]
            kept = [layer.head(h) for h in range(layer.surviving.kv_heads)]
            layers.append(
                PlainLayer(
                    torch.cat([keys[-9:] for keys, _ in kept]),
                    torch.cat([values[-9:] for _, values in kept]),
                    type(layer.surviving)(heads, grown.tokens),
                )
            )
        return CompressedKV(self.name, {}, grown.tokens, grown.descriptors, tuple(layers))


class Copying(NormDropper):
    """Its own extend, which appends as the base does."""

    def extend(self, compressed: CompressedKV, rows: PrefixView, context: CompressContext) -> CompressedKV:
        return super().extend(compressed, rows, context)


FACTORIES = {
    "round": lambda options: RoundQuantizer(unit=2, residual=4),
    "redrop": lambda options: Redropper(Budget(keep=0.5)),
    "copy": lambda options: Copying(Budget(keep=0.5)),
}


def folding(name: str, tier: str) -> Engine:
    specs = [spec(name, FACTORIES[name], Budget if name != "round" else IdentityOptions)]
    return engine_over(model("llama"), specs=specs, compressor=name, full_kv=tier, fold=4, window=5)


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("name", FACTORIES)
def test_folding_changes_no_bit(name: str, tier: str) -> None:
    ours, params = folding(name, tier), LONG if tier == "host" else SHORT
    with watching(ours) as plain:
        (expected,) = ours.generate(PROMPT, params, compressor=None, record_logits=True)
    references = {tuple(PROMPT): expected.token_ids}
    for drafter in (lambda request, at, own: own, AntiOracle(references, VOCAB), Scripted(references, VOCAB, (0, 5, 2, 1))):
        with drafting(drafter), watching(ours) as drafted:
            (found,) = ours.generate(PROMPT, params, record_logits=True)
        assert_same(found, expected)
        assert same_rows(drafted.in_order()[0], plain.in_order()[0])
        assert not found.metrics.degraded


@pytest.mark.parametrize("name", FACTORIES)
def test_the_tail_stays_short_and_the_codes_are_those_of_the_full_rows(name: str) -> None:
    """After folds, rejections and all, the prefix is what compressing the same rows at once gives."""
    ours, seen = folding(name, "device"), []
    step = ours.loop.step

    def looking() -> list[Request]:
        done = step()
        for request in ours.loop.requests:
            if request.draft is None or request.draft.drafted:
                continue
            seen.append(request.draft.tail)
            if name == "round":
                compare_codes(request)
        return done

    def compare_codes(request: Request) -> None:
        draft: Any = request.draft
        tokens = draft.prefix_tokens
        view = PrefixView(ours.adapter.layers, range(tokens), lambda layer: request.full.read(layer, 0, tokens))
        fresh = RoundQuantizer(unit=2, residual=4).compress(view, CompressContext())
        for mine, theirs in zip(draft.current().layers, fresh.layers, strict=True):
            assert torch.equal(mine.keys.decoded(), theirs.keys.decoded())  # type: ignore[union-attr]
            assert torch.equal(mine.values.decoded(), theirs.values.decoded())  # type: ignore[union-attr]

    ours.loop.step = looking  # type: ignore[method-assign]
    ours.generate(PROMPT, LONG)
    assert max(seen) <= 4 + 5 + 1
    assert len(seen) > 5
