"""The script that runs these files: nothing hangs, nothing is left behind, nothing that fails passes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

RUNNER = Path(__file__).parent.parent / "run_tests.py"
# A child in a session of its own, as servers are; its process id goes to a file.
SERVER = """
import pathlib, subprocess, sys, time
def server():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    pathlib.Path({pid!r}).write_text(str(child.pid))
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Where to write a file of tests that calls ``server()``."""
    return tmp_path / "test_it.py"


def write(file: Path, body: str) -> Path:
    file.write_text(SERVER.format(pid=str(file.with_suffix(".pid"))) + body)
    return file


def start(
    *files: Path, seconds: int = 600, grace: float = 60.0, path: str | None = None, strict: str = "0"
) -> subprocess.Popen[str]:
    environment = {**os.environ, "SCALEOUT_SECONDS": str(seconds), "SCALEOUT_GRACE": str(grace)}
    environment["SCALEOUT_REQUIRE_REDIS"] = strict
    if path is not None:
        environment["PATH"] = path
    command = [sys.executable, str(RUNNER), *map(str, files)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def output_of(runner: subprocess.Popen[str]) -> str:
    """What it printed until its end."""
    try:
        return runner.communicate(timeout=600)[0]
    finally:
        runner.kill()


def server_of(file: Path) -> int:
    return int(file.with_suffix(".pid").read_text())


def test_what_passes_passes(file: Path) -> None:
    runner = start(write(file, "def test(): pass"))
    output = output_of(runner)
    assert runner.returncode == 0, output
    assert "test_it.py: passed" in output


def test_a_failure_is_one_and_the_others_still_run(file: Path, tmp_path: Path) -> None:
    bad = write(file, "def test(tmp_path):\n    (tmp_path / 'server.log').write_text('last words')\n    assert 0")
    good = write(tmp_path / "test_other.py", "def test(): pass")
    runner = start(bad, good)
    output = output_of(runner)
    assert runner.returncode == 1
    assert "test_it.py: failed with status 1" in output
    assert "last words" in output
    assert "test_other.py: passed" in output


def test_a_file_without_tests_is_a_failure(file: Path) -> None:
    runner = start(write(file, ""))
    output = output_of(runner)
    assert runner.returncode == 1
    assert "failed with status 5" in output


def test_what_is_left_behind_is_ended_and_named(file: Path) -> None:
    runner = start(write(file, "def test(): server()"), grace=2.0)
    output = output_of(runner)
    assert runner.returncode == 1
    assert "left processes behind" in output
    assert "time.sleep(600)" in output
    assert not psutil.pid_exists(server_of(file))


def test_a_hang_is_ended_and_shows_where(file: Path) -> None:
    write(file, "def test():\n    server()\n    where_it_hangs()\ndef where_it_hangs(): time.sleep(6000)")
    for seconds in (10, 60, 300):  # a busy machine may need the first for Python to start
        runner = start(file, seconds=seconds, grace=20.0)
        output = output_of(runner)
        assert runner.returncode == 1
        assert f"not done after {seconds} s" in output
        if "in where_it_hangs" in output:
            break
    assert "in where_it_hangs" in output
    assert not psutil.pid_exists(server_of(file))


def test_ending_the_runner_ends_everything(file: Path) -> None:
    runner = start(write(file, "def test():\n    server()\n    time.sleep(600)"))
    deadline = time.monotonic() + 600
    while not file.with_suffix(".pid").exists() or not file.with_suffix(".pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    family = psutil.Process(runner.pid).children(recursive=True)
    assert len(family) >= 2
    runner.send_signal(signal.SIGTERM)
    output_of(runner)
    assert runner.returncode == 128 + signal.SIGTERM
    assert not any(process.is_running() for process in family)


def test_without_redis_it_says_what_was_not_tested(file: Path, tmp_path: Path) -> None:
    runner = start(write(file, "def test(): pass"), path=str(tmp_path))
    output = output_of(runner)
    assert runner.returncode == 0, output
    assert output.startswith("NOT TESTED")
    assert output.rstrip().splitlines()[-1].startswith("NOT TESTED")
    assert "apt-get install redis-server" in output


def test_redis_may_be_required(file: Path, tmp_path: Path) -> None:
    write(file, "def test(): pass")
    runner = start(file, path=str(tmp_path), strict="1")
    output = output_of(runner)
    assert runner.returncode == 1, output
    assert "redis-server is missing" in output
    assert "nothing was run" in output
    assert file.name not in output
    program = tmp_path / "redis-server"
    program.write_text("")
    program.chmod(0o755)
    runner = start(file, path=str(tmp_path), strict="1")
    output = output_of(runner)
    assert runner.returncode == 0, output
    assert "NOT TESTED" not in output
