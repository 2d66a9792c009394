"""A system in another Python environment, as a child process that is asked over its standard streams.

Whatever goes wrong there (no such program, an exception, a crash, silence) is a row that says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from vericache_core.bench.throughput.measured import Measured, Unavailable
from vericache_core.bench.throughput.workloads import Workload
from vericache_core.errors import UsageError
from vericache_core.plugins.fields import did_you_mean

KINDS: Final = {"vllm": "peer_vllm", "kvpress": "peer_kvpress", "llama-cpp": "peer_llama_cpp"}
"""What ``--peer`` may name, and the module that speaks for it."""
FOLDER: Final = Path(__file__).parent / "peers"


class PeerFault(Exception):
    """A peer failed; the text says how."""


def parse_peer(text: str) -> tuple[str, str]:
    """``NAME=/path/to/python``.

    Raises:
        UsageError: of another form, an unknown name, or nothing that can be run at the path.
    """
    name, equals, python = text.partition("=")
    if not equals or not python:
        raise UsageError(f"--peer {text}: not of the form NAME=/path/to/python", hint=f"names: {', '.join(KINDS)}")
    if name not in KINDS:
        near = did_you_mean(name, KINDS)
        suffix = f"; did you mean {near!r}?" if near else ""
        raise UsageError(f"--peer: unknown peer {name!r}{suffix}", hint=f"names: {', '.join(KINDS)}")
    if not os.access(python, os.X_OK) or Path(python).is_dir():
        raise UsageError(f"--peer {name}: {python} is no program", hint="give the python of the peer's environment")
    return name, python


class PeerSystem:
    """A peer.

    Args:
        name: for the table.
        python: interpreter of its environment.
        module: in ``folder``, with the class ``Peer``.
        load: what it is loaded with; ``max_len``, ``requests`` and ``kv_bytes`` are added.
        timeout: seconds for a single answer.
        token_bytes: full KV of one token; ``kv_bytes`` tells the peer what all requests need.
    """

    lossless = False

    def __init__(
        self,
        name: str,
        python: str,
        module: str,
        load: Mapping[str, Any],
        timeout: float,
        token_bytes: int,
        folder: Path = FOLDER,
    ) -> None:
        self.name, self._python, self._module, self._load, self._timeout = name, python, module, dict(load), timeout
        self._token_bytes, self._folder = token_bytes, folder
        self._child: _Child | None = None
        self._size = (0, 0)
        self._refusal: str | None = None
        self.about: dict[str, Any] = {}

    def prepare(self, workload: Workload) -> None:
        if workload.budget_share is not None:
            raise Unavailable("knows no cap on device KV")
        if self._refusal is not None:
            raise Unavailable(self._refusal)
        longest = max(len(prompt.token_ids) for prompt in workload.prompts) + workload.new_tokens
        size = (max(longest, self._size[0]), max(len(workload.prompts), self._size[1]))
        if self._child is not None and size == self._size:
            return
        self.close()  # it was loaded for shorter sequences
        self._size = size
        try:
            self._child = _Child([self._python, str(FOLDER / "serve.py"), self._module], self._folder)
            size_of = {"max_len": size[0], "requests": size[1], "kv_bytes": size[0] * size[1] * self._token_bytes}
            answer = self._child.ask({"op": "load", **self._load, **size_of}, self._timeout)
        except PeerFault as fault:
            self.close()
            self._refusal = f"does not start: {fault}"  # and would not for the next workload
            raise Unavailable(self._refusal) from fault
        except BaseException:
            self.close()
            raise
        self.about = answer["about"]

    def run(self, workload: Workload) -> Measured:
        assert self._child is not None
        prompts = [list(prompt.token_ids) for prompt in workload.prompts]
        try:
            answer = self._child.ask({"op": "run", "prompts": prompts, "new_tokens": workload.new_tokens}, self._timeout)
            return _measured(answer, workload, self.about)
        except BaseException:
            self.close()  # it may still be working on what nobody waits for
            raise

    def release(self) -> None:
        """The peer stays up: loading takes long."""

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None


def _measured(answer: Mapping[str, Any], workload: Workload, about: Mapping[str, Any]) -> Measured:
    """The answer, checked: another program wrote it."""
    try:
        tokens = [[int(token) for token in one] for one in answer["tokens"]]
        decoded, seconds = int(answer["decoded"]), float(answer["decode_seconds"])
        held, prefill = answer.get("peak_device_kv_bytes"), answer.get("prefill_seconds")
        steps = None if answer.get("steps") is None else int(answer["steps"])
        notes = [str(note) for note in answer.get("notes", ())]
    except (KeyError, TypeError, ValueError) as error:
        raise PeerFault(f"answered nonsense: {type(error).__name__}: {error}") from error
    if len(tokens) != len(workload.prompts) or decoded <= 0 or seconds <= 0:
        raise PeerFault(f"answered {len(tokens)} outputs, {decoded} tokens in {seconds:g} s")
    notes.append(", ".join(f"{key} {value}" for key, value in about.items()))
    return Measured(tokens, decoded, seconds, prefill, peak_device_kv_bytes=held, steps=steps, notes=notes)


class _Child:
    """The process. Its standard error goes to a file, whose last line explains a crash."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the process)
        environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONUNBUFFERED": "1"}
        try:
            self._process = subprocess.Popen(  # noqa: S603  (the user names the program)
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=environment,
            )
        except OSError as error:
            self._log.close()
            raise PeerFault(str(error)) from error

    def ask(self, request: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """Send one request and wait for its answer.

        Raises:
            PeerFault: it said that it failed, ended, answered nonsense or did not answer in time.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            self._kill()

        timer = threading.Timer(timeout, end)
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # reading says why
                self._process.stdin.write(json.dumps(request).encode() + b"\n")
                self._process.stdin.flush()
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        if late.is_set():
            raise PeerFault(f"no answer in {timeout:g} s")
        if not line:
            raise PeerFault(f"ended with status {self._process.wait()}: {self._last_words()}")
        try:
            answer: dict[str, Any] = json.loads(line)
            good = answer["ok"]
        except (ValueError, KeyError, TypeError) as error:
            raise PeerFault(f"answered {line[:80]!r}") from error
        if not good:
            raise PeerFault(" ".join(str(answer.get("error", "no reason given")).split())[:500])
        return answer

    def _last_words(self) -> str:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 4000))
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else "nothing on standard error"

    def _kill(self) -> None:
        """End it and its children, which are in a process group that it opens as the first thing it does."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()

    def close(self) -> None:
        """End the process and what it started: first by the end of its input, then by force."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2)
        self._kill()
        self._process.wait()
        self._log.close()
