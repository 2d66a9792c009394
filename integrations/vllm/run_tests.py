# ruff: noqa: INP001 (a script, not a package)
"""Runs files of tests one by one: ``python run_tests.py FILE ...``.

Each gets a process of its own, because vLLM engines do not share one; a deadline, because an engine that waits for a
server which is gone waits without end; and what is left of its processes is ended, and counts as a failure.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import psutil

SECONDS = int(os.environ.get("SCALEOUT_SECONDS", "1800"))
"""Longest that one file may take: only a hang does. On two idle cores the longest takes a tenth of it."""
GRACE = float(os.environ.get("SCALEOUT_GRACE", "60"))
"""Seconds for processes to end by themselves; none is waited for that has ended."""
LOG_LINES = 60
NO_REDIS = (
    "NOT TESTED: that the full KV comes back from Redis. redis-server is missing, LMCache keeps KV in its memory only; "
    "install it (Debian: apt-get install redis-server) and run this again"
)
REQUIRE_REDIS = os.environ.get("SCALEOUT_REQUIRE_REDIS", "0") not in ("", "0")
"""Whether a missing ``redis-server`` is an error, and not one test less."""
ROUNDS = 5
"""Times that children of the killed are looked for."""
PR_SET_CHILD_SUBREAPER = 36
"""Of Linux's ``prctl``."""

# Random weights, no hub, nothing reported to anybody; one thread, because tiny models gain nothing from two and threads that
# spin for each other lose much on busy cores. No compiled helpers: each engine would spend half a minute of two cores on
# those that rank log-probabilities, and need a C++ compiler.
ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "NUMBA_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def main(files: Sequence[str]) -> int:
    """Run all ``files``, failed ones before others included; returns an exit status."""
    missing = [] if shutil.which("redis-server") else [NO_REDIS]
    for line in missing:
        say(line)
    if missing and REQUIRE_REDIS:
        say("nothing was run, as SCALEOUT_REQUIRE_REDIS asks")
        return 1
    adopt_orphans()
    signal.signal(signal.SIGTERM, _interrupt)
    lines, failed = [], False
    try:
        for file in files:
            say(f"== {file}")
            begun = time.monotonic()
            with tempfile.TemporaryDirectory(prefix="test-scaleout-") as folder:
                problem = run(file, Path(folder, "pytest"))
                if problem is not None:
                    failed = True
                    show_logs(Path(folder))
            lines.append(f"{time.monotonic() - begun:6.0f} s  {Path(file).name}: {problem or 'passed'}")
    finally:
        end(psutil.Process().children(recursive=True))
    say("\n".join(["== all files", *lines, *missing]))
    return int(failed)


def run(file: str, folder: Path) -> str | None:
    """Run one file of tests; returns what went wrong.

    Args:
        file: of tests.
        folder: for what it writes; does not exist.
    """
    command = [sys.executable, "-m", "pytest", "-q", "--durations=5", "--durations-min=5", f"--basetemp={folder}", file]
    pytest = subprocess.Popen(command, stdin=subprocess.DEVNULL, env={**ENVIRONMENT, **os.environ})  # noqa: S603
    status = wait(pytest)
    problem = f"failed with status {status}" if status else None
    if status is None:
        problem = f"not done after {SECONDS} s"
        pytest.send_signal(signal.SIGABRT)  # pytest's fault handler writes where each thread is
    _, left = psutil.wait_procs(psutil.Process().children(recursive=True), GRACE)
    if left:
        problem = "; ".join(filter(None, [problem, f"left processes behind: {names_of(left)}"]))
        end(left)
    return problem


def wait(process: subprocess.Popen[bytes]) -> int | None:
    """Exit status of ``process``, ``None`` if it runs on after ``SECONDS``; those that a paused machine slept do not count."""
    for _ in range(SECONDS):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(1.0)
    return None


def adopt_orphans() -> None:
    """Make this process the parent of all that its descendants leave behind, so that they are found."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def end(processes: Sequence[psutil.Process]) -> None:
    """Kill ``processes`` and all that they leave behind."""
    for _ in range(ROUNDS):
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, GRACE)
        processes = psutil.Process().children(recursive=True)
        if not processes:
            return
    say(f"processes that cannot be killed: {names_of(processes)}")


def names_of(processes: Sequence[psutil.Process]) -> str:
    """What they are, each once."""
    names = set()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            names.add(" ".join(process.cmdline()[:4]) or process.name())
    return ", ".join(sorted(names))


def show_logs(folder: Path) -> None:
    """What the servers of a file of tests last said."""
    for log in sorted(folder.rglob("*.log")):
        say(f"== end of {log.name}")
        say("\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:]))


def say(text: str) -> None:
    """Print a line now, between those of child processes."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _interrupt(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
