"""A store and a drafter that are told to stop while full KV is on its way over a link that would take hours."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.cache.test_stop import PATIENCE, Gate, ends
from tests.remote.stores import PREFIX, drafter, plain, prompts, store, store_engine, token_file
from tests.remote.test_process import FAST, folder  # noqa: F401  # a fixture
from vericache_core.cli import draft
from vericache_core.cli.main import main
from vericache_core.config import EngineConfig
from vericache_core.engine import Engine
from vericache_core.errors import RemoteError
from vericache_core.remote.auth import Guard
from vericache_core.remote.commands import Commands
from vericache_core.remote.limits import Limits
from vericache_core.remote.prepare import Ask
from vericache_core.remote.server import StoreServer
from vericache_core.remote.verifier import Verifier
from vericache_core.runtime.sampling_params import SamplingParams

PARAMS = SamplingParams(max_new_tokens=12)


def slow_store(folder: Path | None = None) -> tuple[Engine, Gate]:  # noqa: F811
    """A store's engine, of the model in ``folder`` if given, whose swaps do not come, and what tells that one waits."""
    if folder is None:
        engine = store_engine(full_kv="host")
    else:
        config = EngineConfig(rows=16, probe=False, full_kv="host", pack_weights="auto")
        engine = Engine.from_pretrained(str(folder), config)
    gate, link = Gate(), engine.loop.ring.link
    link._sleep, link.bytes_per_s = gate.sleep, 1.0
    return engine, gate


def draft_lines(folder: Path, tmp_path: Path, port: int) -> int:  # noqa: F811
    """Exit status of ``vericache draft`` over standard input, whose store verifies and which gives nobody any grace."""
    argv = ["draft", "-m", str(folder), *FAST, "-c", "identity", "--remote", f"127.0.0.1:{port}", "--grace", "0"]
    argv += ["--token-file", token_file(tmp_path), "--remote-mode", "verify-stateless", "--remote-timeout", "3600"]
    return main(argv)


def steps_until(ours: Engine, event: threading.Event) -> None:
    """Step until something else has happened; fails where it does not come to that."""
    until = time.monotonic() + PATIENCE
    while not event.is_set():
        if time.monotonic() > until:
            pytest.fail(f"the store did not come to it in {PATIENCE:.0f} s")
        ours.step()


@pytest.mark.fault("verifier", "stopped while it waits for a load of hours")
@pytest.mark.parametrize("grace", [0.0, 0.2, None])
def test_a_store_stops_while_it_waits_for_a_load_and_costs_no_token(grace: float | None, tmp_path: Path) -> None:
    """Without a grace period it is the verifier alone that stops; whoever waits for a verdict must not get half a one."""
    engine, gate = slow_store()
    with store(tmp_path, engine) as server, drafter(tmp_path, server.port, remote_mode="verify-stateless") as ours:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(ours.generate(prompts(2), PARAMS)), daemon=True)
        thread.start()
        assert gate.entered.wait(PATIENCE)
        ends(server.verifier.close if grace is None else lambda: server.stop(grace))
        thread.join(PATIENCE)
        assert [output.token_ids for output in found] == [output.token_ids for output in plain(prompts(2), PARAMS)]
        assert all(output.finish_reason == "length" and output.metrics.degraded for output in found)
        if grace is None:
            assert all("is closing" in output.metrics.degraded[0] for output in found)
        assert engine.loop.ring.nbytes == 0


@pytest.mark.fault("hang", "a load of the verifier, while the drafter stops")
def test_a_drafter_stops_while_its_store_waits_for_a_load(tmp_path: Path) -> None:
    engine, gate = slow_store()
    with store(tmp_path, engine) as server:
        ours = drafter(tmp_path, server.port, remote_mode="verify-stateless")
        jobs = [ours.submit(prompt, PARAMS) for prompt in prompts(2)]
        steps_until(ours, gate.entered)
        ends(jobs[0].cancel)
        ends(ours.close)
        assert [job.result().finish_reason for job in jobs] == ["cancelled"] * 2


@pytest.mark.fault("hang", "a load of the verifier, while the drafter drains")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_draining_drafter_gives_lines_up_when_its_grace_is_over(
    number: signal.Signals,
    folder: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The signal comes while the store waits for a load that takes hours; the answer says what became of the line."""
    engine, gate = slow_store(folder)

    def tell() -> None:
        if gate.entered.wait(PATIENCE):
            os.kill(os.getpid(), number)

    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps({"id": "a", "prompt": "the quick brown fox " * 12})))
    with store(tmp_path, engine) as server:
        threading.Thread(target=tell, daemon=True).start()
        assert draft_lines(folder, tmp_path, server.port) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["id"], answer["finish_reason"], answer["error"]) == ("a", "cancelled", None)


@pytest.mark.fault("hang", "a load of the verifier: every line of a draining drafter is answered")
def test_a_draining_drafter_answers_every_line_that_had_come(
    folder: Path,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (engine, gate), busy = slow_store(folder), threading.Event()
    next_line = draft._next

    def unless_busy(lines: Any, *, wait: bool) -> str | None:
        return "" if busy.is_set() else next_line(lines, wait=wait)

    def lines() -> Iterator[str]:
        yield json.dumps({"id": "a", "prompt": "the quick brown fox " * 12})
        if gate.entered.wait(PATIENCE):
            busy.set()  # in a step, from now on to the signal
            yield json.dumps({"id": "b", "prompt": "jumps"})
            yield "nonsense"
            yield json.dumps({"prompt": "over"})
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(draft, "_next", unless_busy)
    monkeypatch.setattr("sys.stdin", lines())
    with store(tmp_path, engine) as server:
        assert draft_lines(folder, tmp_path, server.port) == 0
    first, *others = map(json.loads, capsys.readouterr().out.splitlines())
    assert [answer["id"] for answer in (first, *others)] == ["a", "b", None, 2]
    assert [answer.get("finish_reason") for answer in (first, *others)] == ["cancelled", "cancelled", None, "cancelled"]
    assert [answer["error"] is None for answer in (first, *others)] == [True, True, False, True]
    assert others[0].keys() == first.keys()


@pytest.mark.fault("settings", "a drafter's grace and metrics")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--grace", "-1"], "--grace is to be 0 or more"),
        (["--grace", "5", "a prompt"], "--grace is for requests on standard input"),
        (["--metrics", "127.0.0.1:0", "a prompt"], "--metrics is for requests on standard input"),
        (["--metrics", "nowhere"], "expected HOST:PORT"),
    ],
)
def test_what_a_drafter_cannot_do_is_told_before_it_talks_to_its_store(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"127.0.0.1:{free.getsockname()[1]}"
    assert main(["draft", "-m", "/nowhere", "--remote", nobody, *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.fault("settings", "a port that is taken while a model loads")
def test_a_store_whose_port_is_taken_meanwhile_closes_its_engine(
    folder: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[Engine] = []
    close = Engine.close

    def closing(engine: Engine) -> None:
        closed.append(engine)
        close(engine)

    monkeypatch.setattr(Engine, "close", closing)
    monkeypatch.setattr("vericache_core.service.http.check_free", lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(["store", "serve", "-m", str(folder), *FAST, "--full-kv", "device", "--insecure", "--listen", address]) == 2
    assert f"cannot listen on {address}" in capsys.readouterr().err
    assert len(set(map(id, closed))) == 1


@pytest.mark.fault("verifier", "stopped while it computes a prefix")
def test_a_prefix_under_way_does_not_keep_a_store_from_stopping(tmp_path: Path) -> None:
    engine, begun = store_engine(), threading.Event()
    step = engine.loop.step

    def slow() -> Any:
        begun.set()
        return step()

    engine.loop.step = slow  # type: ignore[method-assign]
    with store(tmp_path, engine) as server, drafter(tmp_path, server.port) as ours:
        job = ours.submit(PREFIX, PARAMS)
        steps_until(ours, begun)
        ends(lambda: server.stop(0.0))
        assert job.result().token_ids == plain([PREFIX], PARAMS)[0].token_ids


@pytest.mark.fault("verifier", "stopped before and behind a question")
def test_every_command_is_answered_also_those_that_come_too_late() -> None:
    commands = Commands()
    early, ran = commands.call(lambda: 1), commands.run_next(0.0)
    queued = commands.call(lambda: 2)
    commands.close()
    commands.end()
    late: Future[int] = commands.call(lambda: 3)
    assert ran
    assert early.result(0) == 1
    for refused in (queued, late):
        with pytest.raises(RemoteError, match="closing"):
            refused.result(0)
    assert not commands.run_next(0.0)


@pytest.mark.fault("verifier", "its thread dies with questions before it")
def test_nobody_waits_for_a_verifier_that_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it fails in: a look for silent sessions, and then the removal of what is under way, too."""
    engine, dies = store_engine(), threading.Event()
    real_step, real_remove, real_reap = engine.loop.step, engine.loop.remove, Verifier._reap

    def failing(real: Any) -> Any:
        def call(*arguments: Any) -> Any:
            if dies.is_set():
                raise RuntimeError("a fault of the store")
            return real(*arguments)

        return call

    monkeypatch.setattr(Verifier, "_reap", failing(real_reap))
    monkeypatch.setattr(engine.loop, "remove", failing(real_remove))
    monkeypatch.setattr(engine.loop, "step", lambda: None if dies.is_set() else real_step())  # nothing is decided any more
    verifier = Verifier(engine, Limits())
    sessions = []
    for ids in prompts(2):
        ask = Ask("a tenant", tuple(ids), len(PREFIX), "identity", {}, PARAMS)
        sessions.append(verifier.open(ask, verifier.prepare(ask).result(PATIENCE)).result(PATIENCE))
    for session in sessions:
        session.first.result(PATIENCE)
    asked = threading.Event()

    def die() -> None:
        asked.wait(PATIENCE)
        dies.set()

    verifier._commands.call(die)
    other = Ask("a tenant", tuple(PREFIX[::-1]), len(PREFIX) - 1, "identity", {}, PARAMS)
    under_way: list[Future[Any]] = [
        *(verifier.verify(session, session.seq, len(session.request.generated), [1, 2]) for session in sessions),
        verifier.prepare(other),
    ]
    asked.set()  # and everything is under way when it dies
    for future in under_way:
        with pytest.raises(RemoteError, match="closing"):
            future.result(PATIENCE)
    verifier._thread.join(PATIENCE)
    with pytest.raises(RemoteError, match="closing"):
        verifier.prepare(other).result(PATIENCE)
    ends(verifier.close)
    monkeypatch.undo()
    engine.close()


@pytest.mark.fault("refused", "a verifier that has not begun")
def test_a_store_that_has_not_begun_refuses_connections(tmp_path: Path) -> None:
    """Whoever got through would wait for an answer that cannot come yet."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = StoreServer(store_engine(), f"127.0.0.1:{port}", Guard(None))
    try:
        with socket.socket() as early:
            assert early.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED
        server.start()
        assert server.port == port
        socket.create_connection(("127.0.0.1", port), PATIENCE).close()
    finally:
        server.stop()
