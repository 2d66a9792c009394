"""A process that runs checks one after another: orders on stdin, results on stdout, both JSON lines.

What the compressor prints goes to a file and comes back as part of the result. See ``isolation`` for the other side.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, TextIO

OUTPUT_KEPT = 2000


def main() -> int:
    """Serve orders until stdin ends. The first line describes the subject and the settings."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    orders, replies, sink = _take_over_streams()
    first = json.loads(orders.readline())
    _limit_memory(first["memory"])
    sys.path[:] = [*first["path"], *[entry for entry in sys.path if entry not in first["path"]]]
    from vericache_conform.catalogue import all_checks, find_check
    from vericache_conform.execute import Settings, execute
    from vericache_conform.outcome import Result
    from vericache_conform.runner import NOT_LOADED, describe, expectations_of
    from vericache_conform.subject import resolve

    all_checks()  # imported before the clock of the first check starts
    ready: dict[str, Any] = {"problem": ""}
    try:
        subject = resolve(first["ref"], first["options"])
        if first["expected"]:
            subject.expected_file = Path(first["expected"])
        expectations = expectations_of(subject)
        ready |= {"subject": describe(subject), "expectations": expectations.to_json()}
        settings = Settings(first["seed"], first["model"], {subject.name: expectations.declared}, first["timeout_factor"])
    except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a plugin raises becomes a failed S-01
        subject, ready["problem"] = None, " ".join(str(error).split()) or type(error).__name__
    replies.write(json.dumps(ready, default=str) + "\n")
    replies.flush()
    for line in orders:
        order = json.loads(line)
        check = find_check(order["check"])
        sink.seek(0)
        sink.truncate()
        if subject is None:
            failed = check.id == "S-01"
            made = Result(check.id, first["name"], "fail" if failed else "skip", ready["problem"] if failed else NOT_LOADED)
        else:
            made = execute(check, subject, settings, order.get("only"))
        reply = {**made.to_json(), "output": _read(sink)}
        replies.write(json.dumps(reply, default=str) + "\n")
        replies.flush()
    return 0


def _end_with_parent(parent: int) -> None:
    """A run that was killed must not leave a worker behind that hangs for ever."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _take_over_streams() -> tuple[TextIO, TextIO, Any]:
    """Keep the pipes for ourselves; what anything else writes to 1 or 2 lands in a file."""
    orders = os.fdopen(os.dup(0), "r", encoding="utf-8")
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    sink = tempfile.TemporaryFile(mode="w+b", buffering=0)  # noqa: SIM115  # lives as long as the process
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(sink.fileno(), 1)
    os.dup2(sink.fileno(), 2)
    return orders, replies, sink


def _read(sink: Any) -> str:
    sys.stdout.flush()
    sys.stderr.flush()
    sink.seek(0)
    text: str = sink.read().decode(errors="replace")
    return text if len(text) <= OUTPUT_KEPT else "... " + text[-OUTPUT_KEPT:]


def _limit_memory(limit: int | None) -> None:
    if limit is None:
        return
    try:
        import resource
    except ImportError:  # not on this platform
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard in (resource.RLIM_INFINITY, -1) or limit <= hard:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


if __name__ == "__main__":
    sys.exit(main())
