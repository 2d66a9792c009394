"""``vericache-conform report FILE``."""

from __future__ import annotations

import argparse

from vericache_conform.report.model import read_report
from vericache_conform.report.terminal import print_report
from vericache_conform.report.write import add_format_arguments, write_formats


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("file", metavar="FILE", help="a report of `run --json` or `run --report`")
    parser.add_argument("--json", action="store_true", help="JSON lines on stdout, as they were written")
    add_format_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Show or convert a report. The exit code is that of the run."""
    report = read_report(args.file)
    write_formats(report, args)
    if args.json:
        for line in report.lines():
            print(line)
    else:
        print_report(report)
    return int(report.footer["exit_status"])
