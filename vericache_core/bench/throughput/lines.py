"""Runs in a file, one JSON object a line, each written when it is known: what a killed benchmark leaves behind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from vericache_core.bench.throughput.measured import Measured
from vericache_core.bench.throughput.rows import Record
from vericache_core.errors import UsageError

SCHEMA: Final = "vericache.bench.throughput.runs/1"


class Lines:
    """Appends to a new file.

    Raises:
        UsageError: it cannot be written, or holds something already.
    """

    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
        self._path = path
        try:
            if path.exists() and path.stat().st_size:
                raise UsageError(f"--lines {path}: exists", hint="name another file; --render shows the runs in this one")
            path.write_text(_line({"schema": SCHEMA, "head": dict(head)}), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--lines {path}: cannot be written", cause=error.strerror) from error

    def add(self, record: Record, repetition: int | None) -> None:
        """Write what is new of ``record``."""
        found: dict[str, Any] = {
            "system": record.system,
            "workload": record.workload,
            "lossless": record.lossless,
            "place": record.place,
            "facts": dict(record.facts),
        }
        if repetition is None:
            found |= {"problem": record.problem, "skipped": record.skipped}
        else:
            found |= {"repetition": repetition, "run": record.runs[repetition].to_json()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line(found))


def read_lines(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """``(head, records)``; a line that was cut off while it was written counts for nothing.

    Raises:
        UsageError: the file cannot be read or is another one.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--render {path}: cannot be read", cause=str(error)) from error
    head = parsed_line(lines[0]) if lines else None
    if head is None or head.get("schema") != SCHEMA:
        raise UsageError(f"--render {path}: holds no runs", hint="it takes what --lines wrote")
    records: dict[tuple[str, str], Record] = {}
    for line in lines[1:]:
        found = parsed_line(line)
        if found is None:
            continue
        key = (found["workload"], found["system"])
        made = Record(found["system"], found["workload"], found["lossless"], found["place"], found["facts"])
        record = records.setdefault(key, made)
        if "run" in found:
            record.runs[found["repetition"]] = Measured.from_json(found["run"])
        else:
            record.problem, record.skipped = found["problem"], found["skipped"]
    return head["head"], list(records.values())


def without_trace(measured: Measured) -> Measured:
    """A run without its events: one repetition of each system is enough for the plots."""
    return replace(measured, trace=None)


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"


def parsed_line(line: str) -> dict[str, Any] | None:
    """The JSON object of a line; None if it is not one."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
