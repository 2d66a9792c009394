"""``vericache-conform schema [NAME]``."""

from __future__ import annotations

import argparse
import json

from vericache_conform.report.schema import SCHEMAS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("name", nargs="?", choices=sorted(SCHEMAS), default="report", help="which output [report]")
    parser.add_argument("--json", action="store_true", help="accepted for uniformity; the output is JSON anyway")


def run(args: argparse.Namespace) -> int:
    """Print one JSON Schema."""
    print(json.dumps(SCHEMAS[args.name], indent=2))
    return 0
