"""What a store says of its health when the thread of its verifier has died."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.remote.stores import store, store_engine
from tests.remote.test_process import FAST, folder
from vericache_core.cli import metrics_args
from vericache_core.cli.main import main
from vericache_core.errors import RemoteError
from vericache_core.remote.prepare import Ask
from vericache_core.remote.server import StoreServer
from vericache_core.remote.verifier import Verifier
from vericache_core.runtime.sampling_params import SamplingParams
from vericache_core.service.http import Service

__all__ = ["folder"]  # a fixture
PATIENCE = 60.0


def health(port: int) -> list[tuple[int, str]]:
    """Status and text of ``/healthz`` and ``/readyz``."""
    found = []
    for path in ("healthz", "readyz"):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10) as answer:
                found.append((answer.status, answer.read().decode()))
        except urllib.error.HTTPError as error:
            with error:
                found.append((error.code, error.read().decode()))
    return found


class Deadly:
    """Lets the verifier's thread end at its next look for silent sessions, once it is told to."""

    def __init__(self, fault: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, real = threading.Event(), Verifier._reap

        def reap(verifier: Verifier) -> None:
            if self.now.is_set():
                raise fault
            real(verifier)

        monkeypatch.setattr(Verifier, "_reap", reap)


@pytest.mark.fault("verifier", "its thread dies: health and readiness say so, and callers are answered")
@pytest.mark.parametrize("fault", [RuntimeError, SystemExit])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_health_says_failed_when_the_thread_has_died(
    fault: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadly = Deadly(fault, monkeypatch)
    with store(tmp_path, store_engine()) as server, Service("127.0.0.1", 0) as service:
        port = service.address[1]
        service.watch(lambda: server.verifier.failed)
        service.ready()
        assert health(port) == [(200, "ready")] * 2
        deadly.now.set()
        server.verifier._thread.join(PATIENCE)
        assert health(port) == [(503, "failed")] * 2
        service.state = "draining"  # which it cannot do any more
        assert health(port) == [(503, "failed")] * 2
        with pytest.raises(RemoteError):
            server.verifier.prepare(Ask("a tenant", (1, 2, 3), 2, None, {}, SamplingParams())).result(PATIENCE)


def test_a_store_that_stops_in_order_has_not_failed(tmp_path: Path) -> None:
    with store(tmp_path, store_engine()) as server:
        assert not server.verifier.failed
    assert not server.verifier._thread.is_alive()
    assert not server.verifier.failed


@pytest.mark.fault("verifier", "its thread dies: the process says so and ends")
def test_the_process_of_such_a_store_ends_with_an_error(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not every supervisor asks for health, and all of them notice an end."""
    deadly = Deadly(RuntimeError, monkeypatch)
    said: list[list[tuple[int, str]]] = []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    real_show, real_stop = metrics_args.show_engine, StoreServer.stop

    def show(*arguments: Any) -> None:
        real_show(*arguments)
        said.append(health(port))
        deadly.now.set()

    def stop(server: StoreServer, grace: float | None = None) -> None:
        said.append(health(port))
        real_stop(server, grace)

    monkeypatch.setattr("vericache_core.cli.store.show_engine", show)
    monkeypatch.setattr(StoreServer, "stop", stop)
    argv = ["store", "serve", "-m", str(folder), *FAST, "--full-kv", "device", "--insecure", "--listen", "127.0.0.1:0"]
    assert main([*argv, "--metrics", f"127.0.0.1:{port}"]) == 1
    assert said[:2] == [[(200, "ready")] * 2, [(503, "failed")] * 2]
    error = capsys.readouterr().err
    assert "the verifier of the store has ended by a fault of its own" in error
