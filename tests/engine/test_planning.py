"""What the planner reckons with before a compressor has shown what it keeps."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from tests.models import build
from vericache_core import Engine, EngineConfig, SamplingParams

PROMPT = [1 + at % 90 for at in range(1024)]


def draft_bytes(**config: Any) -> float:
    """Device bytes that one request is expected to hold beside its full KV on the host."""
    with Engine(build("llama", max_position_embeddings=2048), config=EngineConfig(compressor="random", **config)) as engine:
        request = engine.builder.for_prompt(PROMPT, SamplingParams(max_new_tokens=8), "random")
        return engine.planner.holds(request).device


@pytest.mark.parametrize(
    "config",
    [{"keep": 0.25}, {"options": {"keep": 0.25}}, {"options": {"keep": "0.25"}}, {"keep_tokens": 256}],
    ids=["field", "option", "text", "tokens"],
)
def test_a_budget_counts_however_it_is_written(config: dict[str, Any]) -> None:
    whole = draft_bytes(keep=1.0)
    assert 0.25 * whole < draft_bytes(**config) < 0.45 * whole


def test_auto_drafts_where_drafts_are_far_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    from vericache_core.runtime import planning
    from vericache_core.runtime.costs import CostModel, Link
    from vericache_core.runtime.rounds import RoundPricer
    from vericache_core.runtime.speculation import ProposalBelief

    # Reading KV is all that costs, so a quarter of it is four times as fast.
    costs = CostModel({8: 1e-6, 128: 1e-6}, read=1e-6, pair=1e-9, links={"host": Link(0.0, 1e-12)}, layers=2)
    monkeypatch.setattr(planning.Planner, "pricer", property(lambda self: RoundPricer(costs)))
    model = build("llama", max_position_embeddings=2048)
    for options in ({"keep": 0.25}, {"keep": "0.25"}):
        config = EngineConfig(compressor="random", options=options, mode="auto", window="auto", full_kv="host")
        with Engine(model, config=config) as engine:
            assert engine.planner.mode("random", 1024, 64, 4) != "plain"
    # Where speculation on full KV has held so far, drafting is not worth its memory.
    config = EngineConfig(compressor="random", keep=0.25, mode="auto", window="auto", full_kv="host", proposer="ngram")
    for agreed, plain in ((16, True), (0, False)):
        with Engine(model, config=config) as engine:
            for _ in range(100):
                ProposalBelief(engine.planner._proposal_experience).observe(16, agreed)
            assert (engine.planner.mode("random", 1024, 64, 4) == "plain") == plain
    with Engine(model, config=EngineConfig(compressor="random", keep=1.0, mode="auto", window="auto")) as engine:
        assert engine.planner.mode("random", 1024, 64, 4) == "plain"


def test_full_kv_that_rests_on_the_device_is_never_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for one full KV beside its drafts, and steps cost the same for one as for eight: all swap if they can."""
    from vericache_core.runtime import planning
    from vericache_core.runtime.costs import CostModel, Link
    from vericache_core.runtime.rounds import RoundPricer

    costs = CostModel({8: 1.0, 128: 1.0}, read=1e-12, pair=1e-12, links={"host": Link(0.0, 1e-12)}, layers=2)
    monkeypatch.setattr(planning.Planner, "pricer", property(lambda self: RoundPricer(costs)))
    budget = int(1.5 * draft_bytes(keep=1.0))
    tiers: tuple[tuple[Literal["host", "device"], str], ...] = (("host", "offloaded"), ("device", "plain"))
    for tier, mode in tiers:
        config = EngineConfig(
            compressor="random", keep=0.1, mode="auto", window="auto", full_kv=tier, device_budget=budget, scheduler="staggered"
        )
        with Engine(build("llama", max_position_embeddings=2048), config=config) as engine:
            assert engine.planner.mode("random", 1024, 64, 8) == mode


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_what_a_request_holds_and_swaps_follows_its_own_full_kv(tier: str) -> None:
    """Whatever the configuration says of full KV in general."""
    with Engine(build("llama"), config=EngineConfig(compressor="random", full_kv="host")) as engine:
        full = engine.builder.make_full_kv(None, tier)
        request = engine.builder.make_request(PROMPT[:64], SamplingParams(max_new_tokens=8), full)
        full.tokens = 64
        held, situation = engine.planner.holds(request), engine.planner._situation(request, lambda: (1, 1))
        assert [where for where in ("device", "host", "disk") if getattr(held, where)] == [tier]
        assert situation.tier == tier
        assert situation.swap_bytes == (0.0 if tier == "device" else situation.full_bytes)  # there is no draft KV to spare some
        full.tokens = 0
        request.close()
