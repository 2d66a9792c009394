"""What ``vericache bench throughput`` prints and writes, kept up to date while it measures."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from vericache_core.bench.throughput.lines import Lines, without_trace
from vericache_core.bench.throughput.rows import PLAIN, Record, broken, row
from vericache_core.bench.throughput.table import HEADER, cells, markdown
from vericache_core.cli.output import print_table
from vericache_core.errors import UsageError

SCHEMA: Final = "vericache.bench.throughput/1"


class Report:
    """Everything that is known, written anew whenever there is more of it."""

    def __init__(self, head: Mapping[str, Any], args: argparse.Namespace) -> None:
        self.head, self.records, self._args = head, list[Record](), args
        self._printed: set[tuple[str, str]] = set()
        self._lines = None if args.lines is None else Lines(Path(args.lines), head)
        self._files: list[tuple[str, Path]] = []
        for kind in ("markdown", "html"):
            name = getattr(args, kind)
            if name is not None:
                try:
                    Path(name).write_text("", encoding="utf-8")
                except OSError as error:
                    raise UsageError(f"--{kind} {name}: cannot be written", cause=error.strerror) from error
                self._files.append((kind, Path(name)))

    def add(self, record: Record, repetition: int | None, last: bool) -> None:
        """Take in what is new."""
        if not any(record is other for other in self.records):
            self.records.append(record)
        if repetition:  # the first one keeps its events for the plots
            record.runs[repetition] = without_trace(record.runs[repetition])
        if self._lines is not None:
            self._lines.add(record, repetition)
        self.write()
        if last:
            self._print(record)

    def rows(self) -> list[dict[str, Any]]:
        """One row each, workload by workload, systems in their own order whoever was first to have figures."""
        workloads = list(dict.fromkeys(record.workload for record in self.records))
        ordered = sorted(self.records, key=lambda record: (workloads.index(record.workload), record.place))
        return [self._row(record) for record in ordered]

    def _row(self, record: Record) -> dict[str, Any]:
        plain = next((r for r in self.records if (r.system, r.workload) == (PLAIN, record.workload)), None)
        return row(record, plain)

    def write(self) -> None:
        """Write the files that were asked for."""
        from vericache_core.bench.throughput.page import html_page

        for kind, path in self._files:
            rows = self.rows()
            text = markdown(self.head, rows) if kind == "markdown" else html_page(self.head, rows, self.records)
            partial = path.with_name(path.name + ".part")
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)  # a reader sees the former page or this one

    def _print(self, record: Record) -> None:
        key = (record.system, record.workload)
        if self._args.json and key not in self._printed:
            self._printed.add(key)
            print(json.dumps({"schema": SCHEMA, **self._row(record)}, ensure_ascii=False, allow_nan=False), flush=True)

    def end(self) -> int:
        """Print what has not been printed; returns the exit code."""
        rows = self.rows()
        for record in self.records:
            self._print(record)
        if not self._args.json:
            print_table(HEADER, [cells(one) for one in rows])
        return 1 if broken(rows) else 0
