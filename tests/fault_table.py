"""A pytest plugin that makes the fault table out of the tests: ``make faults``, or ``pytest -m fault --fault-table FILE``.

A test says with ``@pytest.mark.fault("hang", "Redis, at any step")`` which row it belongs to (``tests/fault_rows.py``), and
counts with the fixture ``tally`` what it goes through; one that does not counts as one case. With the option each such test
is watched: what it leaves open is a leak, and what does not come back in ten minutes a hang. The page is only
written, and the run only a success, if every row has its cases and none of them went wrong.
"""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from tests.fault_rows import ROWS

BEGIN: Final = "<!-- made by `make faults` -->"
END: Final = "<!-- end of what `make faults` made -->"
HANG_SECONDS: Final = 600
"""Far beyond every deadline of the tests, which look at those themselves: a test that is not back by then hangs."""
BEFORE: Final = pytest.StashKey[set[str]]()
"""What was open before a test."""
PATIENCE: Final = 10.0
"""Seconds in which threads and sockets may still close when a test has ended."""


@dataclass
class Tally:
    """What a test went through."""

    cases: int = 0
    wrong: int = 0

    def add(self, cases: int = 1, wrong: int = 0) -> None:
        """So many cases more, with so many wrong rows, tokens, blobs or keys."""
        self.cases += cases
        self.wrong += wrong


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    """Counts cases for the fault table; the test ends with nothing wrong."""
    counted = Tally()
    yield counted
    request.node.user_properties += [("cases", counted.cases), ("wrong", counted.wrong)]
    assert counted.wrong == 0


class Hang(BaseException):
    """A test did not come back."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option."""
    parser.addoption(
        "--fault-table", metavar="FILE", help="make the fault table from tests with the marker 'fault'; - prints it"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Watch, but only if asked to."""
    if config.getoption("--fault-table"):
        config.pluginmanager.register(Watch(), "fault-watch")
        if not hasattr(config, "workerinput"):  # the controller alone has all reports
            config.pluginmanager.register(Reporter(config.getoption("--fault-table")), "fault-table")


def open_things() -> set[str]:
    """Files, sockets, pipes, threads and children of this process, and shared memory of ours.

    Event descriptors are left out: gRPC keeps its own until the process ends.
    """
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue  # the one that lists them
        if not target.startswith(("anon_inode:", "/dev/", "/proc/")):
            found.add(f"file {entry.name} {target}")
    found |= {f"thread {thread.name} {thread.ident}" for thread in threading.enumerate() if _matters(thread)}
    for task in Path("/proc/self/task").iterdir():
        try:
            found |= {f"process {child}" for child in (task / "children").read_text().split()}
        except OSError:
            continue  # a thread that has just ended
    found |= {f"memory {path}" for path in Path("/dev/shm").glob("*vericache*")}
    return found


def _matters(thread: threading.Thread) -> bool:
    return not thread.daemon or "vericache" in thread.name


class Watch:
    """Measures each test with the marker: what it leaves open, and whether it comes back."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Note what is open before, and what a fixture of a whole module or session opens."""
        if item.get_closest_marker("fault") is None:
            return (yield)
        lasting = [
            found
            for name in getattr(item, "fixturenames", ())
            for found in item.session._fixturemanager.getfixturedefs(name, item) or ()
            if found.scope != "function" and found.cached_result is None
        ]
        item.stash[BEFORE] = open_things()
        try:
            return (yield)
        finally:
            if lasting:
                item.stash[BEFORE] = open_things()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Break off what hangs."""
        marks = list(item.iter_markers("fault"))
        if not marks:
            return (yield)
        item.user_properties += [("fault", "\t".join(map(str, mark.args))) for mark in marks]

        def expired(*_: object) -> None:
            item.user_properties.append(("hangs", 1))
            raise Hang(f"not back after {HANG_SECONDS} s")

        before = signal.signal(signal.SIGALRM, expired)
        signal.alarm(HANG_SECONDS)
        try:
            return (yield)
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Count what is open that was not before."""
        if BEFORE not in item.stash:
            return (yield)
        try:
            return (yield)
        finally:
            before, until = item.stash[BEFORE], time.monotonic() + PATIENCE
            while (left := open_things() - before) and time.monotonic() < until:
                gc.collect()
                time.sleep(0.05)
            item.user_properties.append(("leaks", len(left)))
            item.user_properties += [("left", what) for what in sorted(left)]


@dataclass
class Line:
    """One test function under one row."""

    what: str
    tests: int = 0
    cases: int = 0
    wrong: int = 0
    hangs: int = 0
    leaks: int = 0

    def add(self, other: Line) -> None:
        """Sum up."""
        self.tests += other.tests
        self.cases += other.cases
        self.wrong += other.wrong
        self.hangs += other.hangs
        self.leaks += other.leaks

    @property
    def numbers(self) -> str:
        """Cells of a table."""
        return f"{self.tests} | {self.cases:,} | {self.wrong} | {self.hangs} | {self.leaks}"


@dataclass(eq=False)  # pytest hashes its plugins
class Reporter:
    """Collects what the tests report, wherever they ran, and writes the page."""

    target: str
    lines: dict[str, dict[str, Line]] = field(default_factory=lambda: defaultdict(dict))
    problems: list[str] = field(default_factory=list)
    skipped: set[str] = field(default_factory=set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take what one test counted; it is all there when the test is torn down."""
        if report.failed:
            self.problems.append(f"{report.nodeid} failed")
        if report.skipped:
            self.skipped.add(report.nodeid)
        if report.nodeid in self.skipped:
            return
        if report.when != "teardown":
            return
        counted: dict[str, int] = defaultdict(int)
        faults = []
        for name, value in report.user_properties:
            if name == "fault":
                faults.append(str(value))
            elif name == "left":
                self.problems.append(f"{report.nodeid} left {value}")
            elif isinstance(value, int):
                counted[name] += value
        where = report.nodeid.split("[", 1)[0].removeprefix("tests/")
        for fault in faults:
            row, _, what = fault.partition("\t")
            if row not in ROWS:
                self.problems.append(f"{where}: no row is called {row!r}")
                continue
            cases = counted.get("cases", 1)
            line = self.lines[row].setdefault(where, Line(what))
            line.add(Line(what, 1, cases, counted["wrong"], counted["hangs"], counted["leaks"]))

    def judge(self) -> list[str]:
        """What is wrong with the table."""
        found = list(self.problems)
        for name, row in ROWS.items():
            total = self.total(name)
            if total.cases < row.least:
                found.append(f"row {name!r} ({row.text}) has {total.cases} cases of {row.least}")
            bad = {"wrong": total.wrong, "hangs": total.hangs, "leaks": total.leaks}
            found += [f"row {name!r} ({row.text}): {count} {kind}" for kind, count in bad.items() if count]
        return found

    def total(self, row: str) -> Line:
        """Of all tests of a row."""
        total = Line("")
        for line in self.lines.get(row, {}).values():
            total.add(line)
        return total

    def render(self) -> str:
        """The tables, in Markdown."""
        text = [BEGIN, ""]
        for section in dict.fromkeys(row.section for row in ROWS.values()):
            names = [name for name, row in ROWS.items() if row.section == section]
            text += [f"## {section}", "", "| what | tests | cases | wrong | hangs | leaks |", "|---|---|---|---|---|---|"]
            text += [f"| {ROWS[name].text} | {self.total(name).numbers} |" for name in names]
            text += ["", "| what | where | test | tests | cases | wrong | hangs | leaks |", "|---|---|---|---|---|---|---|---|"]
            for name in names:
                for where, line in sorted(self.lines.get(name, {}).items()):
                    text.append(f"| {ROWS[name].text.split(':')[0]} | {line.what} | `{where}` | {line.numbers} |")
            text.append("")
        return "\n".join([*text, END])

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the page, or fail."""
        if self.judge():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        elif self.target != "-":
            page = Path(self.target)
            before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
            page.write_text(before + self.render() + rest.partition(END)[2], encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print it."""
        terminalreporter.section("fault table")
        terminalreporter.write_line(self.render())
        problems = self.judge()
        for problem in problems:
            terminalreporter.write_line(f"FAULT TABLE: {problem}", red=True)
        skipped = f"; {len(self.skipped)} tests were skipped, and are not in it" if self.skipped else ""
        terminalreporter.write_line(f"{'not ' if problems else ''}a full table{skipped}")
