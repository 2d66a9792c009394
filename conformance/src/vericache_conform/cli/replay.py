"""``vericache-conform replay FILE``: the failures of a report again, each with just the input that failed."""

from __future__ import annotations

import argparse
import time

from vericache_conform.catalogue import find_check
from vericache_conform.execute import Settings
from vericache_conform.isolation import Worker
from vericache_conform.report.model import Report, dump, line_of, read_report
from vericache_conform.report.terminal import Screen, print_report
from vericache_core.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("file", metavar="FILE", help="a report of `run --json` or `run --report`")
    parser.add_argument("--check", action="append", default=[], metavar="ID", help="only this check (repeatable)")
    parser.add_argument("--json", action="store_true", help="JSON lines on stdout")


def run(args: argparse.Namespace) -> int:
    """Exit 0 when nothing fails any more."""
    old = read_report(args.file)
    wanted = {find_check(name).id for name in args.check}
    failed = [r for r in old.results if r.outcome in ("fail", "error", "xfail") and (not wanted or r.check in wanted)]
    if not failed:
        raise UsageError(f"{args.file} holds no failure to replay")
    subjects = {entry["name"]: entry for entry in old.header["subjects"]}
    report = Report({**old.header, "replay_of": args.file, "required": []})
    started = time.perf_counter()
    if args.json:
        print(dump(report.header), flush=True)
    with Screen(show=not args.json) as screen:
        for number, result in enumerate(failed, 1):
            entry = subjects[result.subject]
            if entry.get("ref") is None:
                raise UsageError(f"{result.subject} existed only in the process that wrote {args.file}")
            settings = Settings(old.header["seed"], old.header["model"])
            with Worker(entry["ref"], result.subject, entry.get("options", {}), settings) as worker:
                again = worker.run(find_check(result.check), result.example)
            report.results.append(again)
            if args.json:
                print(dump(line_of(again)), flush=True)
            screen.result(again, number, len(failed))
    status = 1 if any(result.bad for result in report.results) else 0
    footer = report.finish(status, time.perf_counter() - started)
    if args.json:
        print(dump(footer), flush=True)
    else:
        print_report(report)
    return status
