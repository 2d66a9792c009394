"""Work in a fresh interpreter, under another hash seed and thread count: JSON in, JSON out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vericache_conform.case import Case
from vericache_conform.outcome import Failure, Skip

LIMIT = 120.0
"""Seconds that a fresh process may take: less than the checks that start one, so that they say what hangs."""
SLOW = "on a busy machine try --timeout-factor 4"


def in_fresh_process(case: Case, task: str, arguments: Mapping[str, Any], *, hash_seed: int = 0, threads: int = 1) -> Any:
    """Run ``task`` of :mod:`vericache_conform.child` on the subject of the case in another process and return its answer.

    Raises:
        Skip: the subject exists in this process only.
        Failure: the child ended without an answer, or with the error of the compressor.
    """
    subject, limit = case.subject, LIMIT * case.timeout_factor
    if subject.ref is None:
        raise Skip("the descriptor cannot be imported by another process; define it at the top of a module")
    order = {
        "task": task,
        "ref": subject.ref,
        "options": dict(subject.options),
        "path": [entry for entry in sys.path if entry],
        "threads": threads,
        **arguments,
    }
    with tempfile.TemporaryDirectory(prefix="vericache-conform-") as folder:
        environment = {
            **os.environ,
            "PYTHONHASHSEED": str(hash_seed),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": str(threads),
            "TMPDIR": folder,
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        }
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "vericache_conform.child", str(answer)]
        try:
            done = subprocess.run(  # noqa: S603  # our own interpreter and module
                command,
                input=json.dumps(order).encode(),
                capture_output=True,
                env=environment,
                timeout=limit,
                check=False,
                cwd=folder,
            )
        except subprocess.TimeoutExpired as error:
            raise Failure(f"a fresh process did not finish {task} within {limit:g} s; {SLOW}") from error
        if not answer.exists():
            last = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
            raise Failure(f"a fresh process died during {task}: {last[0]}")
        reply = json.loads(answer.read_text(encoding="utf-8"))
    if "error" in reply:
        raise Failure(f"in a fresh process: {reply['error']}")
    return reply["value"]
