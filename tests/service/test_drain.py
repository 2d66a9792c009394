"""Stopping in order, in a process of its own where signals are real."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from vericache_core.service.drain import Drain, draining
from vericache_core.service.http import Service

PROGRAM = """
import sys, threading
from vericache_core.service.drain import draining
from vericache_core.service.http import Service

timeout, work = float(sys.argv[1]), threading.Event()
accepting = [True]

def stop():
    accepting[0] = False

def release():
    sys.stdin.readline()
    work.set()

with Service("127.0.0.1", 0) as service, draining(service, stop, timeout) as drain:
    service.state = "ready"
    threading.Thread(target=release, daemon=True).start()
    print(service.address[1], flush=True)
    while not drain.wait(0.01):
        pass
    print("accepting" if accepting[0] else "refusing", flush=True)
    print("whole" if drain.finish(lambda: 0 if work.is_set() else 1) else "cut", flush=True)
"""


class Running:
    """The program above."""

    def __init__(self, timeout: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(timeout)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.port = int(self.line())

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ready(self) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/readyz", timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code


@pytest.fixture(params=[60.0])
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    started = Running(request.param)
    yield started
    started.process.kill()
    started.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_lets_work_in_flight_finish(running: Running, number: signal.Signals) -> None:
    assert running.ready() == 200
    running.process.send_signal(number)
    assert running.line() == "refusing"
    assert running.ready() == 503
    assert running.process.poll() is None
    assert running.process.stdin is not None
    running.process.stdin.write("\n")
    running.process.stdin.flush()
    assert running.line() == "whole"
    assert running.process.wait(60) == 0


@pytest.mark.parametrize("running", [0.2], indirect=True)
def test_work_that_takes_too_long_is_cut_and_the_process_ends_well(running: Running) -> None:
    running.process.send_signal(signal.SIGTERM)
    assert running.line() == "refusing"
    assert running.line() == "cut"
    assert running.process.wait(60) == 0


def test_the_second_signal_ends_it_at_once(running: Running) -> None:
    running.process.send_signal(signal.SIGTERM)
    assert running.line() == "refusing"
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(60) == 128 + signal.SIGTERM


def test_beginning_twice_stops_once_and_a_failing_stop_still_lets_it_end() -> None:
    calls: list[int] = []

    def stop() -> None:
        calls.append(1)
        raise OSError("socket")

    service = Service("127.0.0.1", 0)
    service.state = "ready"
    drain = Drain(service, stop, 1.0)
    assert not drain.wait(0)
    with pytest.raises(OSError, match="socket"):
        drain.begin()
    drain.begin()
    assert calls == [1]
    assert drain.begun
    assert service.answer("/readyz", "")[:2] == (503, b"draining")
    assert drain.finish(lambda: 0)
    service.close()


def test_handlers_of_before_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with draining():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_off_the_main_thread_it_refuses() -> None:
    failed: list[BaseException] = []

    def elsewhere() -> None:
        try:
            with draining():
                pass
        except ValueError as error:
            failed.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert failed
