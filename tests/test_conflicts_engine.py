"""Settings that are said to do nothing, or not to: what an engine and a store make of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest

from tests.models import model, prompt
from vericache_core.config import EngineConfig, without_effect
from vericache_core.engine import Engine
from vericache_core.plugins.registry import Registry
from vericache_core.remote.limits import Limits
from vericache_core.remote.prepare import Ask
from vericache_core.remote.verifier import Verifier
from vericache_core.runtime.sampling_params import SamplingParams

DRAFTS: Final = {"compressor": "random", "keep": 0.5}
REPEATING: Final = prompt(150, seed=3) + prompt(150, seed=3)[:70]
Seen = Callable[[Any], object]
ON_THE_ENGINE: Final[list[tuple[dict[str, Any], str, dict[str, Any], Seen]]] = [
    # settings, what of them does nothing, a change with which it does something, and what of a request shows that
    ({**DRAFTS, "mode": "plain", "full_kv": "host"}, "compressor", {"mode": "offloaded"}, lambda metrics: metrics.drafted > 0),
    ({**DRAFTS, "mode": "pinned", "full_kv": "host"}, "full_kv", {"mode": "offloaded"}, lambda metrics: metrics.swap_bytes > 0),
    (
        {**DRAFTS, "mode": "offloaded", "full_kv": "device"},
        "mode",
        {"full_kv": "disk"},
        lambda metrics: metrics.mode == "offloaded",
    ),
    ({"window": 3}, "window", {"proposer": "ngram"}, lambda metrics: metrics.proposed > 0),
    ({"full_kv": "disk"}, "full_kv", DRAFTS, lambda metrics: metrics.swap_bytes > 0),
]


@pytest.mark.parametrize(("settings", "idle", "change", "shows"), ON_THE_ENGINE)
def test_what_is_told_is_what_the_engine_does(settings: dict[str, Any], idle: str, change: dict[str, Any], shows: Seen) -> None:
    for given, does in ((settings, False), ({**settings, **change}, True)):
        config = EngineConfig(**given, rows=16, probe=False)
        assert (idle not in without_effect(config, given, fixed=True)) is does
        with Engine(model("llama"), None, config, Registry(discover=False)) as engine:
            (output,) = engine.generate([REPEATING], SamplingParams(max_new_tokens=12, ignore_eos=True))
        assert output.error is None
        assert shows(output.metrics) is does


@pytest.mark.parametrize("mode", ["local", "verify"])
def test_without_a_store_a_remote_request_is_decoded_here_with_its_proposer(mode: str) -> None:
    pytest.importorskip("grpc")
    settings: dict[str, Any] = {
        **DRAFTS,
        "full_kv": "remote",
        "remote": "127.0.0.1:9",
        "remote_mode": mode,
        "proposer": "ngram",
    }
    config = EngineConfig(**settings, rows=16, probe=False, remote_timeout=1.0)
    assert "proposer" not in without_effect(config, settings, fixed=True)
    with Engine(model("llama"), None, config, Registry(discover=False)) as engine:
        (output,) = engine.generate([REPEATING], SamplingParams(max_new_tokens=12, ignore_eos=True))
    assert output.error is None
    assert output.metrics.mode == "plain"
    assert output.metrics.proposed > 0


def test_a_store_compresses_and_swaps_whatever_mode_says() -> None:
    settings: dict[str, Any] = {**DRAFTS, "mode": "plain", "full_kv": "disk"}
    config = EngineConfig(**settings, rows=16, probe=False)
    assert without_effect(config, settings) == {}
    assert set(without_effect(config, settings, fixed=True)) == {"compressor", "keep", "full_kv"}
    verifier = Verifier(Engine(model("llama"), None, config, Registry(discover=False)), Limits())
    try:
        params = SamplingParams(max_new_tokens=4, ignore_eos=True)
        ids = tuple(REPEATING)
        ask = Ask("x", ids, len(ids) - 1, config.compressor, config.compressor_options(), params, stateless=True)
        prefix = verifier.prepare(ask).result()
        assert prefix.blobs
        assert verifier.open(ask, prefix).result().request.full.tier == "disk"
    finally:
        verifier.close()
        verifier.engine.close()
