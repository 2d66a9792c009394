"""``vericache-conform compare A B...``."""

from __future__ import annotations

import argparse

from vericache_conform.report.compare import changes, leaderboard
from vericache_conform.report.model import read_report
from vericache_core.cli.output import print_json, print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="reports; the compressors of all of them are compared")
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    """Print the leaderboard, and with two reports what changed; exit 1 when something got worse."""
    reports = [read_report(file) for file in args.files]
    board = leaderboard(reports)
    moved = changes(reports[0], reports[1]) if len(reports) == 2 else []
    if args.json:
        print_json("vericache-conform.compare/1", {"leaderboard": board, "changes": moved})
    else:
        columns = ["compressor", "level", "acceptance", "bytes_share", "compress_ms", "passed", "failed", "skipped"]
        print_table([c.upper().replace("_", " ") for c in columns], [[_cell(row[c]) for c in columns] for row in board])
        for change in moved:
            print(f"{change['compressor']} {change['check']}: {change['before']} -> {change['after']}")
    return 1 if any(change["worse"] for change in moved) else 0


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
