"""A drafter and a store over loopback give the tokens of local plain decoding."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import model, prompt
from tests.remote.stores import drafter, plain, prompts, same, store, store_engine
from vericache_core.errors import ConfigError
from vericache_core.remote.loop import RemoteLoop
from vericache_core.runtime.sampling_params import SamplingParams

PARAMS = SamplingParams(max_new_tokens=24)


@pytest.mark.parametrize("compressor", ["identity", "random", "adversarial"])
def test_tokens_are_those_of_plain_decoding(tmp_path: Path, compressor: str) -> None:
    options: dict[str, Any] = {"keep": 0.5} if compressor == "random" else {}
    expected = plain(prompts(3), PARAMS)
    with store(tmp_path) as server, drafter(tmp_path, server.port, compressor=compressor, **options) as engine:
        got = engine.generate(prompts(3), PARAMS)
        same(got, expected)
        assert all(output.metrics.mode == "remote" for output in got)
        assert all(not output.metrics.degraded for output in got)
        if compressor == "identity":
            assert all(output.metrics.accepted == output.metrics.drafted > 0 for output in got)


def test_a_second_batch_uses_what_has_come(tmp_path: Path) -> None:
    with store(tmp_path) as server, drafter(tmp_path, server.port, compressor="random", keep=0.3) as engine:
        engine.generate(prompts(1), PARAMS)
        assert isinstance(engine.loop, RemoteLoop)
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


@pytest.mark.parametrize("mode", ["verify", "verify-stateless", "remote", "stream", "stream-stateless", "fetch", "local"])
def test_every_path_gives_the_same_tokens(tmp_path: Path, mode: str) -> None:
    expected = plain(prompts(2), PARAMS)
    with store(tmp_path) as server, drafter(tmp_path, server.port, compressor="random", keep=0.4, remote_mode=mode) as engine:
        got = engine.generate(prompts(2), PARAMS)
        same(got, expected)
        assert all(not output.metrics.degraded for output in got)
        home = mode in {"fetch", "local"}
        assert all(output.metrics.mode == ("plain" if home else "remote") for output in got) or mode.startswith("stream")
        if mode == "remote":
            assert all(output.metrics.drafted == 0 for output in got)


@pytest.mark.parametrize("compressor", ["identity", "random"])
def test_full_kv_that_came_is_that_of_a_prefill(tmp_path: Path, compressor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What streams in beside the compressed KV, put together with it, has the bits of a local prefill."""
    send = RemoteLoop._send

    def send_later(self: RemoteLoop) -> None:
        if all(prefix.rows is not None for prefix in self._prefixes._held.values()):
            send(self)

    monkeypatch.setattr(RemoteLoop, "_send", send_later)  # or all could be over before the rows have come
    options: dict[str, Any] = {} if compressor == "identity" else {"keep": 0.3}
    with (
        store(tmp_path) as server,
        drafter(tmp_path, server.port, compressor=compressor, remote_mode="stream", **options) as engine,
    ):
        same(
            engine.generate(prompts(2), SamplingParams(max_new_tokens=80)), plain(prompts(2), SamplingParams(max_new_tokens=80))
        )
        assert isinstance(engine.loop, RemoteLoop)
        (prefix,) = engine.loop._prefixes._held.values()
        assert prefix.rows is not None
        with store_engine() as local:
            request = local.builder.make_request(
                prefix.ids, SamplingParams(max_new_tokens=2), local.builder.make_full_kv(None, "device")
            )
            local.loop.add(request)
            while not request.generated:
                local.loop.step()
            for index, pages in prefix.rows.items():
                for mine, theirs in zip(pages.rows(0, 150), request.full.read(index, 0, 150), strict=True):
                    assert torch.equal(mine, theirs)
            local.loop.remove(request)


SAMPLED = [
    SamplingParams(max_new_tokens=20, temperature=0.8, seed=5),
    SamplingParams(max_new_tokens=20, temperature=1.2, top_k=40, top_p=0.9, min_p=0.01, seed=6),
    SamplingParams(max_new_tokens=20, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5),
    SamplingParams(max_new_tokens=20, no_repeat_ngram=2, bad_words=((5, 6), (9,)), min_new_tokens=3),
    SamplingParams(max_new_tokens=0),
    SamplingParams(max_new_tokens=1),
    SamplingParams(max_new_tokens=2),
    SamplingParams(max_new_tokens=12, logprobs=3),
]


def test_the_store_samples_stops_and_counts(tmp_path: Path) -> None:
    asked = prompts(len(SAMPLED))
    expected = plain(asked, SAMPLED)
    ends = SamplingParams(max_new_tokens=20, stop_token_ids=(expected[2].token_ids[6],))
    asked, params = [*asked, asked[2]], [*SAMPLED, ends]
    expected = plain(asked, params)
    with store(tmp_path) as server, drafter(tmp_path, server.port, compressor="random", keep=0.6) as engine:
        got = engine.generate(asked, params)
        same(got, expected)
        assert got[7].logprobs == expected[7].logprobs
        assert not any(output.metrics.degraded for output in got)


def test_what_cannot_cross_the_link_is_refused_by_name(tmp_path: Path) -> None:
    with store(tmp_path) as server, drafter(tmp_path, server.port) as engine:
        with pytest.raises(ConfigError, match="logits_processors"):
            engine.generate(prompts(1), SamplingParams(max_new_tokens=4, logits_processors=(lambda _ids, logits: logits,)))
        with pytest.raises(ConfigError, match="record_logits"):
            engine.generate(prompts(1), SamplingParams(max_new_tokens=4), record_logits=True)


def test_requests_come_and_go(tmp_path: Path) -> None:
    """Streaming, cancelling in the middle, and requests that join later."""
    expected = plain(prompts(4), PARAMS)
    with store(tmp_path) as server, drafter(tmp_path, server.port, compressor="random", keep=0.5) as engine:
        first = engine.submit(prompts(4)[0], PARAMS)
        gone = engine.submit(prompts(4)[1], PARAMS)
        while not gone.token_ids:
            engine.step()
        gone.cancel()
        assert gone.token_ids == expected[1].token_ids[: len(gone.token_ids)]
        chunks = [token for chunk in engine.stream(prompts(4)[2], PARAMS) for token in chunk.token_ids]
        assert tuple(chunks) == expected[2].token_ids
        same([first.result(), *engine.generate([prompts(4)[3]], PARAMS)], [expected[0], expected[3]])
    assert not server.verifier.sessions


def test_memory_returns_to_where_it_was(tmp_path: Path) -> None:
    with store(tmp_path) as server:
        with drafter(tmp_path, server.port, compressor="random", keep=0.5) as engine:
            engine.generate(prompts(2), PARAMS)
            (prefix,) = server.verifier.shelf._held.values()
        until = time.monotonic() + 10
        while server.verifier.sessions and time.monotonic() < until:
            time.sleep(0.02)
        assert not server.verifier.sessions
        assert prefix.users == 0
        assert not server.verifier.engine.loop.requests
        server.verifier.shelf.check_integrity()


def test_one_token_of_prefix_and_long_ones(tmp_path: Path) -> None:
    """Prompts of two tokens, of a page less one, a page, a page and one; alone, so that all but one token is prefix."""
    for length in (2, 3, 127, 128, 129, 130):
        asked = [prompt(length, seed=length)]
        with store(tmp_path) as server, drafter(tmp_path, server.port, compressor="random", keep=0.5) as engine:
            got = engine.generate(asked, PARAMS)
            same(got, plain(asked, PARAMS))
            assert not got[0].metrics.degraded


def test_by_measured_costs(tmp_path: Path) -> None:
    with (
        store(tmp_path) as server,
        drafter(tmp_path, server.port, compressor="random", keep=0.5, remote_mode="auto", window="auto") as engine,
    ):
        same(engine.generate(prompts(2), PARAMS), plain(prompts(2), PARAMS))
