"""Run checks in a worker process, so that a compressor that hangs, crashes or eats memory costs one check only."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from vericache_conform.check import Check
from vericache_conform.execute import Settings
from vericache_conform.outcome import Example, Result
from vericache_conform.processes import SLOW

START_ALLOWANCE = 120.0
"""Seconds that a fresh worker may need before its first check starts: importing torch on a busy machine."""
DEFAULT_MEMORY = 8 << 30


class Worker:
    """One worker for one subject, started when it is needed and replaced when it dies.

    Args:
        ref, name, options: the subject, see :mod:`vericache_conform.subject`.
        settings: of the run.
        memory: bytes of data that the worker may hold; None for no limit.
        factor: multiplies every timeout.
        expected: path of a conformance.toml to use instead of the plugin's own.
    """

    def __init__(
        self,
        ref: str,
        name: str,
        options: Mapping[str, Any],
        settings: Settings,
        memory: int | None = DEFAULT_MEMORY,
        factor: float = 1.0,
        expected: str | None = None,
    ) -> None:
        self.name, self.memory, self.factor = name, memory, factor
        self._first = {
            "ref": ref,
            "name": name,
            "options": dict(options),
            "path": [entry for entry in sys.path if entry],
            "seed": settings.seed,
            "model": settings.model,
            "memory": memory,
            "timeout_factor": factor,
            "expected": expected,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        self._fresh = True

    def describe(self) -> dict[str, Any]:
        """What the worker found when it loaded the subject: ``subject`` and ``expectations``, or a ``problem``."""
        process = self._started()
        try:
            line = self._lines.get(timeout=START_ALLOWANCE * self.factor)
        except queue.Empty:
            self.close()
            return {"problem": f"it does not load within {START_ALLOWANCE * self.factor:g} s; {SLOW}"}
        if line is None:
            code = process.wait()
            self.close()
            return {"problem": f"the process died while it was loaded ({_cause(code)})"}
        self._fresh = False
        found: dict[str, Any] = json.loads(line)
        return found

    def run(self, check: Check, only: Example | None = None) -> Result:
        """The result of one check, or an error that says how the worker ended."""
        process = self._started()
        limit = START_ALLOWANCE * self.factor
        try:
            line = self._lines.get(timeout=limit) if self._fresh else b"ready before"
            if line is not None:
                self._fresh = False
                self._send({"check": check.id, "only": only})
                limit = check.timeout * self.factor
                line = self._lines.get(timeout=limit)
        except queue.Empty:
            self.close()
            return self._error(check, f"no answer within {limit:g} s: it hangs or is far too slow; {SLOW}")
        except BrokenPipeError:
            line = None
        if line is None:
            code = process.wait()
            self.close()
            return self._error(check, f"the process died ({_cause(code)})")
        return Result.from_json(json.loads(line))

    def close(self) -> None:
        """End the worker, whatever it is doing."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Worker:  # noqa: PYI034  # Self needs Python 3.11
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            command = [sys.executable, "-m", "vericache_conform.worker"]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603  # our own module
            self._process, self._lines, self._fresh = process, queue.Queue(), True
            threading.Thread(target=_pump, args=(process, self._lines), daemon=True).start()
            self._send(self._first)
        return self._process

    def _send(self, order: Mapping[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()

    def _error(self, check: Check, message: str) -> Result:
        return Result(
            check.id, self.name, "error", message, reproduce=f"vericache-conform run {self._first['ref']} --check {check.id}"
        )


def _pump(process: subprocess.Popen[bytes], lines: queue.Queue[bytes | None]) -> None:
    assert process.stdout is not None
    try:
        for line in process.stdout:
            lines.put(line)
    except ValueError:  # closed while we were reading
        return
    finally:
        lines.put(None)


def _cause(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
