"""A drafter and a store over loopback give the tokens of local plain decoding."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import model
from tests.remote.stores import drafter, plain, prompts, same, store, store_engine
from vericache_core.runtime.sampling_params import SamplingParams

PARAMS = SamplingParams(max_new_tokens=24)


@pytest.mark.parametrize("compressor", ["identity", "random", "adversarial"])
def test_tokens_are_those_of_plain_decoding(tmp_path: Path, compressor: str) -> None:
    options = {} if compressor == "identity" else {"keep": 0.5}
    expected = plain(prompts(3), PARAMS)
    with store(tmp_path) as server, drafter(tmp_path, server.port, compressor=compressor, **options) as engine:
        got = engine.generate(prompts(3), PARAMS)
        same(got, expected)
        assert all(output.metrics.mode == "remote" for output in got)
        assert all(not output.metrics.degraded for output in got)
        if compressor == "identity":
            assert all(output.metrics.accepted == output.metrics.drafted > 0 for output in got)
        assert not server.verifier.sessions or all(not s.request.finished for s in server.verifier.sessions.values())


def test_a_second_batch_uses_what_has_come(tmp_path: Path) -> None:
    with store(tmp_path) as server, drafter(tmp_path, server.port, compressor="random", keep=0.3) as engine:
        engine.generate(prompts(1), PARAMS)
        received = engine.loop.stats.received_bytes
        got = engine.generate(prompts(2), PARAMS)
        same(got, plain(prompts(2), PARAMS))
        assert received > 0


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_layers_that_no_compressor_takes_come_exact(tmp_path: Path, name: str) -> None:
    loaded = model(name)
    with (
        store(tmp_path, store_engine(loaded)) as server,
        drafter(tmp_path, server.port, loaded, compressor="random", keep=0.4) as engine,
    ):
        got = engine.generate(prompts(2), PARAMS)
        same(got, plain(prompts(2), PARAMS, loaded))
        assert all(not output.metrics.degraded for output in got)
