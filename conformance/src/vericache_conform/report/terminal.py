"""On a terminal: progress while it runs, then a table. Elsewhere: one plain line per result."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Final

from vericache_conform.outcome import Result
from vericache_conform.report.model import Report
from vericache_core.cli.output import color_enabled

STYLES: Final = {"pass": "green", "fail": "red", "error": "red", "skip": "yellow", "xfail": "yellow", "xpass": "red"}


class Screen:
    """Shows results as they come: a progress bar on stderr if that is a terminal, plain lines on stdout if that is none."""

    def __init__(self, *, show: bool) -> None:
        self._lines = show and not sys.stdout.isatty()
        self._progress: Any = None
        self._task: Any = None

    def __enter__(self) -> Screen:  # noqa: PYI034  # final in practice
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._progress = Progress(console=Console(stderr=True), transient=True)
            self._task = self._progress.add_task("checks", total=None)
            self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()

    def result(self, result: Result, done: int, total: int) -> None:
        """Show one result."""
        if self._progress is not None:
            self._progress.update(self._task, completed=done, total=total, description=f"{result.subject} {result.check}")
        if self._lines:
            print(line(result), flush=True)


def line(result: Result) -> str:
    """One result as a plain line."""
    text = f"{result.outcome.upper():5} {result.check} {result.subject} ({result.seconds:.1f} s)"
    return text + (f": {one_line(result.message)}" if result.message else "")


def one_line(text: str) -> str:
    """The text without line breaks."""
    return " ".join(text.split())


def print_report(report: Report) -> None:
    """The verdict on stdout: details of what is bad, a table, the levels, and the last line."""
    told: dict[tuple[str, str], str] = {}  # (compressor, what its own line raised) -> the first check that says so
    for result in report.results:
        if not result.bad:
            continue
        raised = result.facts.get("raised")
        first = told.setdefault((result.subject, raised), result.check) if raised else result.check
        if first == result.check:
            _details(result)
        else:
            print(f"\n{result.outcome.upper()} {result.check} {result.subject}: {raised}, as {first}")
    if color_enabled(sys.stdout):
        _table(report)
    for name in report.subjects:
        level, reasons = report.level(name), report.short_of_certified(name)
        more = (
            f" (not certified: {reasons[0]}" + (f", and {len(reasons) - 1} more)" if len(reasons) > 1 else ")")
            if reasons
            else ""
        )
        print(f"{name}: {level}" + (more if level == "passed" else ""))
    print(report.summary())


def _details(result: Result) -> None:
    from vericache_conform.catalogue import all_checks

    check = all_checks().get(result.check)
    print(f"\n{result.outcome.upper()} {result.check} {result.subject}: {one_line(result.message)}")
    if check is not None:
        print(f"  promise:   {check.title}")
        print(f"  fix:       {check.fix}")
    if result.example is not None:
        print(f"  example:   {dict(result.example)}")
    mismatch = result.facts.get("mismatch")
    if mismatch:
        print(f"  mismatch:  {mismatch}")
    if result.output:
        print(f"  printed:   {one_line(result.output)[:300]}")
    if result.reproduce:
        print(f"  reproduce: {result.reproduce}")


def _table(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from vericache_conform.catalogue import all_checks

    checks = all_checks()
    table = Table(title="conformance", title_justify="left")
    for column in ("check", *report.subjects, "promise"):
        table.add_column(column, overflow="fold")
    by_key = {(result.check, result.subject): result for result in report.results}
    for id_ in dict.fromkeys(result.check for result in report.results):
        cells = []
        for name in report.subjects:
            found = by_key.get((id_, name))
            cells.append(Text("-") if found is None else Text(found.outcome, style=STYLES[found.outcome]))
        table.add_row(id_, *cells, checks[id_].title if id_ in checks else "")
    Console().print(table)
