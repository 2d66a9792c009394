"""First drafts made while the compressed prefix comes in: those that are made when all of it is here, and never in the way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import Self

from tests.remote.stores import drafter, plain, prompts, same, store, store_engine, token_file
from vericache_core.cache.draft import DraftKV
from vericache_core.engine import Engine
from vericache_core.remote.auth import Guard
from vericache_core.remote.early import EarlyStep
from vericache_core.remote.frames import Message, decode
from vericache_core.remote.provide import PrefixLoop
from vericache_core.remote.server import StoreServer
from vericache_core.runtime.sampling_params import SamplingParams
from vericache_core.service.access import read_tokens

PARAMS = SamplingParams(max_new_tokens=12)


class Gated(StoreServer):
    """Sends ``open_layers`` layers of a prefix with the opening of a session, and the rest when it is let ``go``."""

    def __init__(self, folder: Path, open_layers: int, change: Callable[[Message], bytes | None] = Message.encode) -> None:
        self.open_layers, self.go, self.change = open_layers, threading.Event(), change
        super().__init__(store_engine(), "127.0.0.1:0", Guard(read_tokens(token_file(folder))))
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.go.set()
        self.stop()

    def _streaming(self, method: Any) -> Any:
        inner = super()._streaming(method)

        def answer(data: bytes, context: Any) -> Iterator[bytes]:
            for said in inner(data, context):
                message = decode(said)
                held = message.kind == "end" or (message.kind == "part" and message.fields["layer"] >= self.open_layers)
                if held:
                    self.go.wait(60)
                changed = self.change(message) if held else said
                if changed is None:
                    return
                yield changed
                if message.kind == "part":  # the first verdicts come before the next part, then
                    while not all(session.first.done() for session in list(self.verifier.sessions.values())):
                        self.go.wait(0.01)

        return answer


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[EarlyStep]:
    """Early steps, as they begin."""
    begun: list[EarlyStep] = []
    run = EarlyStep._run

    def noted(self: EarlyStep) -> None:
        begun.append(self)
        run(self)

    monkeypatch.setattr(EarlyStep, "_run", noted)
    return begun


def drafted(engine: Engine, server: Gated, steps: list[EarlyStep], count: int = 3) -> list[Any]:
    """Answers to ``count`` prompts; the store goes on once an early step is under way."""

    def go() -> None:
        while not steps and not server.go.wait(0.01):
            pass
        server.go.set()

    waits = threading.Thread(target=go)
    waits.start()
    try:
        return engine.generate(prompts(count), PARAMS)
    finally:
        server.go.set()
        waits.join()


@pytest.mark.parametrize("open_layers", [1, 2])
@pytest.mark.parametrize("compressor", ["random", "identity"])
def test_they_are_those_of_a_prefix_that_is_here(
    tmp_path: Path, steps: list[EarlyStep], monkeypatch: pytest.MonkeyPatch, compressor: str, open_layers: int
) -> None:
    """The reference makes no draft before all has come."""
    how: dict[str, Any] = {"compressor": compressor, "keep": 0.5} if compressor == "random" else {"compressor": compressor}
    with Gated(tmp_path, open_layers) as server, drafter(tmp_path, server.port, **how) as engine:
        early = drafted(engine, server, steps)
    assert [len(step.segments) for step in steps] == [2], "16 rows hold the prompts of two"
    assert steps[0].logits is not None
    monkeypatch.setattr(PrefixLoop, "_begin_early", lambda _self: None)
    with store(tmp_path) as server2, drafter(tmp_path, server2.port, **how) as engine:
        late = engine.generate(prompts(3), PARAMS)
    assert len(steps) == 1
    same(early, plain(prompts(3), PARAMS))
    assert not any(output.metrics.degraded for output in early)
    counts = [(output.metrics.drafted_per_round, output.metrics.accepted_per_round) for output in early]
    assert counts == [(output.metrics.drafted_per_round, output.metrics.accepted_per_round) for output in late]


def test_the_kv_comes_with_the_opening_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No call of its own, and nothing for those who find it here or on its way."""
    calls: list[tuple[str, Any]] = []
    stream = StoreServer._streaming

    def noted(self: StoreServer, method: Any) -> Any:
        inner = stream(self, method)

        def answer(data: bytes, context: Any) -> Iterator[bytes]:
            calls.append((method.__name__, decode(data).fields.get("send")))
            yield from inner(data, context)

        return answer

    monkeypatch.setattr(StoreServer, "_streaming", noted)
    with store(tmp_path) as server, drafter(tmp_path, server.port) as engine:
        engine.generate(prompts(2), PARAMS)
        engine.generate(prompts(2), PARAMS)
    assert calls.count(("_open", "prefix")) == 1
    assert calls.count(("_open", None)) == 3
    assert len(calls) == 4


CUTS: dict[str, Callable[[Message], bytes | None]] = {
    "ends": lambda _: None,
    "claims to be complete": lambda _: Message("end", {}).encode(),
    "garbles": lambda message: message.encode()[:-1] + b"\x00",
}


@pytest.mark.fault("closed", "a prefix ends, is garbled or claims to be complete while a first step computes on it")
@pytest.mark.parametrize("cut", CUTS)
def test_a_prefix_that_does_not_come_whole(tmp_path: Path, steps: list[EarlyStep], cut: str) -> None:
    with Gated(tmp_path, 1, CUTS[cut]) as server, drafter(tmp_path, server.port, remote_timeout=5.0) as engine:
        got = drafted(engine, server, steps)
    same(got, plain(prompts(3), PARAMS))
    assert len(steps) == 1
    assert steps[0].logits is None
    assert all(output.metrics.degraded for output in got)


def test_a_request_that_goes_meanwhile(tmp_path: Path, steps: list[EarlyStep]) -> None:
    """The one whose session the prefix comes with: another one has it sent again, and what the step made counts for nobody."""
    with Gated(tmp_path, 1) as server, drafter(tmp_path, server.port) as engine:
        jobs = [engine.submit(prompt, PARAMS) for prompt in prompts(3)]
        while not steps:
            engine.step()
        jobs[0].cancel()
        server.go.set()
        got = [job.result() for job in jobs[1:]]
    same(got, plain(prompts(3), PARAMS)[1:])
    assert not any(output.metrics.degraded for output in got)


def test_a_drafter_closes_while_a_first_step_waits(tmp_path: Path, steps: list[EarlyStep]) -> None:
    """Nothing more comes; the step ends all the same, and the fixture of all these tests finds no thread left."""
    with Gated(tmp_path, 1) as server:
        with drafter(tmp_path, server.port) as engine:
            for prompt in prompts(2):
                engine.submit(prompt, PARAMS)
            while not steps:
                engine.step()
        assert steps[0].over
        assert steps[0].logits is None


def test_what_fails_in_it_alone_is_done_again(tmp_path: Path, steps: list[EarlyStep], monkeypatch: pytest.MonkeyPatch) -> None:
    """The step comes to nothing, and what is drafted when all has come is right."""

    def share(*_: object) -> None:
        raise ValueError("broken")

    with Gated(tmp_path, 1) as server, drafter(tmp_path, server.port) as engine:
        bare = DraftKV.bare_twin

        def broken(self: DraftKV) -> DraftKV:
            twin = bare(self)
            if not server.go.is_set():
                monkeypatch.setattr(twin, "share", share)
            return twin

        monkeypatch.setattr(DraftKV, "bare_twin", broken)
        got = drafted(engine, server, steps)
    same(got, plain(prompts(3), PARAMS))
    assert steps[0].logits is None
    assert not any(output.metrics.degraded for output in got)
    assert all(output.metrics.drafted for output in got)
