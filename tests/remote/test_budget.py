"""The device budget of a drafter counts what its remote requests hold: prefixes that came, and rows of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models import prompt
from tests.remote.stores import drafter, plain, prompts, same, store
from vericache_core.cache.pages import PAGE
from vericache_core.engine import Engine
from vericache_core.errors import ConfigError
from vericache_core.remote.loop import RemoteLoop
from vericache_core.runtime.sampling_params import SamplingParams

PARAMS = SamplingParams(max_new_tokens=24)
KEEP: dict[str, Any] = {"compressor": "random", "keep": 0.5}


def loop_of(engine: Engine) -> RemoteLoop:
    assert isinstance(engine.loop, RemoteLoop)
    return engine.loop


def token_bytes(engine: Engine) -> int:
    return sum(layer.token_bytes for layer in engine.adapter.layers)


def different(count: int) -> list[list[int]]:
    """Prompts of 160 tokens that have nothing in common."""
    return [prompt(160, seed=200 + number) for number in range(count)]


def run_all(engine: Engine, asked: list[list[int]], **how: Any) -> tuple[list[Any], int]:
    """Outputs, and the most sessions that were open at a time."""
    jobs = [engine.submit(ids, PARAMS, **how) for ids in asked]
    most = 0
    while engine.step():
        most = max(most, len(loop_of(engine)._remote))
    return [job.result() for job in jobs], most


def need(folder: Path, port: int, asked: list[int], **settings: Any) -> int:
    """Bytes that one request claims, as the engine counts them."""
    with drafter(folder, port, **settings) as engine:
        loop = loop_of(engine)
        engine.submit(asked, PARAMS)
        loop._first = loop._claim()
        return int(loop._room.held)


@pytest.mark.parametrize("mode", ["verify", "stream", "fetch"])
def test_requests_that_do_not_fit_wait(tmp_path: Path, mode: str) -> None:
    asked = different(3)
    settings: dict[str, Any] = {**KEEP, "remote_mode": mode}
    with store(tmp_path) as server:
        one = need(tmp_path, server.port, asked[0], **settings)
        budget = one + one // 2
        with drafter(tmp_path, server.port, device_budget=budget, **settings) as engine:
            got, most = run_all(engine, asked)
            same(got, plain(asked, PARAMS))
            assert most == 1
            assert not any(output.metrics.degraded for output in got)
            assert 0 < engine.loop.peak_device_kv_bytes <= budget
        with drafter(tmp_path, server.port, device_budget=3 * one, **settings) as engine:
            got, most = run_all(engine, asked)
            same(got, plain(asked, PARAMS))
            assert most > 1, "there is room for all of them"


def test_a_shared_prefix_counts_once(tmp_path: Path) -> None:
    asked = prompts(4)
    with store(tmp_path) as server:
        with drafter(tmp_path, server.port, **KEEP) as engine:
            own = (7 + 3 + 24 + 2 * PAGE) * token_bytes(engine)
            budget = (PAGE + 80) * token_bytes(engine) + 4 * own
        with drafter(tmp_path, server.port, device_budget=budget, **KEEP) as engine:
            got, most = run_all(engine, asked)
            same(got, plain(asked, PARAMS))
            assert most == 4
            assert engine.loop.peak_device_kv_bytes <= budget


def test_one_that_can_never_fit_is_refused_with_one_error(tmp_path: Path) -> None:
    (asked,) = different(1)
    with store(tmp_path) as server:
        budget = need(tmp_path, server.port, asked, **KEEP) - 1
        with drafter(tmp_path, server.port, device_budget=budget, **KEEP) as engine:
            (refused,) = engine.generate([asked], PARAMS)
            assert isinstance(refused.error, ConfigError)
            assert "the device budget is too small for this request" in str(refused.error)
            assert f"{budget:,} bytes" in str(refused.error)
            assert refused.finish_reason == "error"
            assert not server.verifier.sessions, "the store was not bothered"
            short = prompt(20, seed=9)
            same(engine.generate([short], SamplingParams(max_new_tokens=4)), plain([short], SamplingParams(max_new_tokens=4)))
            assert loop_of(engine).stats.sessions == 1


def test_prefixes_that_nobody_uses_are_kept_within_bytes(tmp_path: Path) -> None:
    asked = different(3)
    with store(tmp_path) as server:
        with drafter(tmp_path, server.port, **KEEP) as engine:
            run_all(engine, asked[:1])
            each = loop_of(engine)._prefixes.nbytes
            assert each > 0
        with drafter(tmp_path, server.port, remote_prefix_bytes=2 * each, **KEEP) as engine:
            for ids in asked:
                engine.generate([ids], PARAMS)
            held = loop_of(engine)._prefixes
            assert [prefix.ids for prefix in held._held.values() if prefix.nbytes] == [tuple(ids[:-1]) for ids in asked[1:]]
            sessions = loop_of(engine).stats.received_bytes
            engine.generate([asked[2]], PARAMS)
            assert loop_of(engine).stats.received_bytes == sessions, "it was here"
        with drafter(tmp_path, server.port, remote_prefix_bytes=0, **KEEP) as engine:
            engine.generate([asked[0]], PARAMS)
            assert loop_of(engine)._prefixes.nbytes == 0


def test_plain_requests_and_remote_ones_share_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vericache_core.runtime.loop.MOST_IDLE", 2)  # to wait for the others' bytes is no standstill
    asked = different(3)
    with store(tmp_path) as server:
        mine = need(tmp_path, server.port, asked[0], **KEEP)
        with drafter(tmp_path, server.port, **KEEP) as engine:
            full = (160 + 24 + PAGE) * token_bytes(engine)
        budget = max(mine, full) + min(mine, full) // 2
        with drafter(tmp_path, server.port, device_budget=budget, **KEEP) as engine:
            loop = loop_of(engine)
            jobs = [
                engine.submit(ids, PARAMS, compressor=name)
                for ids, name in zip([*asked, asked[0]], ["random", None, "random", None], strict=True)
            ]
            while engine.step():
                running = sum(ticket.holds.device for ticket in loop.scheduler.running)
                remote = sum(live.prefix.claimed + loop._room._own[number] for number, live in loop._remote.items())
                assert running + remote <= budget
            same([job.result() for job in jobs], plain([*asked, asked[0]], PARAMS))
            assert loop.peak_device_kv_bytes <= budget


def test_a_prefix_larger_than_expected_goes_on_here_or_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (asked,) = different(1)
    with store(tmp_path) as server:
        budget = need(tmp_path, server.port, asked, **KEEP)
        settings: dict[str, Any] = {**KEEP, "keep": 1.0, "device_budget": budget}
        for policy, error in (("recompute", "the device budget is too small"), ("fail", "no room for the compressed prefix")):
            with drafter(tmp_path, server.port, on_remote_error=policy, **settings) as engine:
                monkeypatch.setattr(engine.planner, "share", lambda *_: 0.1)
                (got,) = engine.generate([asked], PARAMS)
                if got.error is not None:
                    assert error in str(got.error)
                else:
                    same([got], plain([asked], PARAMS))
                    assert any("no room for the compressed prefix" in why for why in got.metrics.degraded)
                assert loop_of(engine)._room.held == 0
