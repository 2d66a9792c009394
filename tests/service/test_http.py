"""The endpoint of metrics and health."""

from __future__ import annotations

import http.client
import logging
import socket
import threading
from typing import cast

import pytest

from vericache_core.errors import ConfigError, UsageError
from vericache_core.service.drain import Drain
from vericache_core.service.http import Service, State, check_free, split_address
from vericache_core.service.metrics import Metrics


def ask(service: Service, path: str, method: str = "GET", accept: str = "*/*") -> tuple[int, str, str]:
    connection = http.client.HTTPConnection(*service.address, timeout=10)
    try:
        connection.request(method, path, headers={"Accept": accept})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers["Content-Type"]
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("state", "ready", "healthy"), [("loading", 503, 200), ("ready", 200, 200), ("draining", 503, 200), ("failed", 503, 503)]
)
def test_readiness_and_health_follow_the_state(state: State, ready: int, healthy: int) -> None:
    with Service("127.0.0.1", 0) as service:
        assert ask(service, "/readyz")[:2] == (503, "loading")
        service.state = state
        assert ask(service, "/readyz")[:2] == (ready, state)
        assert ask(service, "/healthz?verbose")[0] == healthy


def test_what_is_told_to_stop_while_it_loads_does_not_become_ready() -> None:
    for before, after in {"loading": "ready", "ready": "ready", "draining": "draining", "failed": "failed"}.items():
        service = Service("127.0.0.1", 0)
        service.state = cast("State", before)
        service.ready()
        assert service.state == after
        service.close()


def test_the_drain_wins_against_whoever_says_ready() -> None:
    """A drain that begins while ``ready`` decides waits, and comes behind it."""
    with Service("127.0.0.1", 0) as service:
        with service._lock:
            drain = threading.Thread(target=Drain(service, None, 1.0).begin)
            drain.start()
            ready = threading.Thread(target=service.ready)
            ready.start()
        drain.join(30)
        ready.join(30)
        assert service.state == "draining"


@pytest.mark.parametrize("address", ["a..b:80", f"{'x' * 64}:80", "127.0.0.1:0x", "nowhere.invalid:80"])
def test_an_address_that_nothing_can_listen_on_is_a_clear_error(address: str) -> None:
    with pytest.raises(UsageError):
        check_free(address)
    with pytest.raises(UsageError):
        Service(*split_address(address))


def test_metrics_come_in_the_format_that_is_asked_for() -> None:
    metrics = Metrics()
    metrics.count_round("kivi", 5, 2)
    with Service("127.0.0.1", 0, metrics) as service:
        status, text, kind = ask(service, "/metrics")
        assert status == 200
        assert kind.startswith("text/plain")
        assert 'vericache_accepted_tokens_total{compressor="kivi"} 2.0' in text.splitlines()
        _, text, kind = ask(service, "/metrics", accept="application/openmetrics-text; version=1.0.0")
        assert kind.startswith("application/openmetrics-text")
        assert text.endswith("# EOF\n")


def test_anything_else_is_not_found_and_a_head_has_no_body() -> None:
    with Service("127.0.0.1", 0) as service:
        assert ask(service, "/metrics")[0] == 404
        assert ask(service, "/../etc/passwd")[0] == 404
        assert ask(service, "/healthz", "HEAD")[:2] == (200, "")
        assert ask(service, "/healthz", "POST")[0] == 501


def test_a_taken_port_is_one_clear_error_and_a_closed_service_frees_its_own() -> None:
    with Service("127.0.0.1", 0) as service:
        host, port = service.address
        with pytest.raises(ConfigError, match=f"cannot listen on {host}:{port}"):
            Service(host, port)
    service.close()
    with socket.socket() as probe:
        assert probe.connect_ex((host, port)) != 0


def test_a_silent_connection_keeps_nobody_out() -> None:
    with Service("127.0.0.1", 0) as service, socket.create_connection(service.address):
        assert ask(service, "/healthz")[0] == 200


@pytest.mark.parametrize(
    ("text", "expected"), [("0.0.0.0:9431", ("0.0.0.0", 9431)), ("[::1]:80", ("::1", 80)), ("store:0", ("store", 0))]
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert split_address(text) == expected


@pytest.mark.parametrize("text", ["", "9431", ":9431", "host:", "host:port", "host:70000", "host:-1", "::1:80", "host:²"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        split_address(text)


def test_a_prober_that_does_not_wait_leaves_no_traceback(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is a bug is logged, with its traceback, in the form of all logs."""
    failures = iter([BrokenPipeError(), ZeroDivisionError("a bug")])

    def breaks(*_: object) -> tuple[int, bytes, str]:
        raise next(failures)

    # Handlers that commands in this process left behind write to stderr as well.
    monkeypatch.setattr(logging.getLogger("vericache"), "handlers", [])
    monkeypatch.setattr(logging.getLogger(), "handlers", [caplog.handler])
    with Service("127.0.0.1", 0) as service:
        monkeypatch.setattr(service, "answer", breaks)
        for _ in range(2):
            with pytest.raises(http.client.RemoteDisconnected):
                ask(service, "/healthz")
    assert capfd.readouterr() == ("", "")
    (record,) = [record for record in caplog.records if record.name == "vericache.service"]
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ZeroDivisionError)
