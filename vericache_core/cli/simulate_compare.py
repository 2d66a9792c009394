"""``vericache simulate --compare``: measured runs of the benchmark beside what the simulator says of them."""

from __future__ import annotations

import argparse
from typing import Any, Final

from vericache_core.cli.output import print_json, print_table
from vericache_core.errors import UsageError
from vericache_core.runtime.calibration import load_calibration
from vericache_core.simulate.measured import Compared, compare, read_runs

SCHEMA: Final = "vericache.simulate.compare/1"
ENGINE_RING: Final = 2
"""Layers of the engine's ring unless ``--ring`` says otherwise."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what is of this comparison alone."""
    parser.add_argument(
        "--compare",
        metavar="FILE",
        help="simulate what `vericache bench throughput --lines FILE` measured, with --calibration; prints how far off it is",
    )


def run(args: argparse.Namespace, token_bytes: int) -> int:
    """Compare row by row."""
    if not args.calibration:
        raise UsageError(
            "--compare needs the costs of the machine that ran", hint="--calibration FILE, from vericache calibrate"
        )
    calibration = load_calibration(args.calibration)
    rows = [compare(row, calibration, token_bytes, args.keep, args.ring or ENGINE_RING) for row in read_runs(args.compare)]
    if args.json:
        print_json(SCHEMA, {"rows": [_json(row) for row in rows]})
        return 0
    header = [
        "WORKLOAD",
        "SYSTEM",
        "TOKENS/S",
        "SIMULATED",
        "OFF",
        "HIDDEN",
        "SIMULATED",
        "PEAK KV GB",
        "SIMULATED",
        "OFF",
        "NOTE",
    ]
    print_table(header, [_cells(row) for row in rows])
    return 0


def _json(row: Compared) -> dict[str, Any]:
    found = row.measured
    return {
        "workload": found.workload,
        "system": found.system,
        "measured": {
            "tokens_per_s": found.tokens_per_s,
            "swap_hidden_fraction": found.hidden,
            "peak_device_kv_bytes": found.peak,
            "drafts_wrong": sum(answer.count(1.0) for answer in found.answers),
            "link_bytes_per_s": found.link,
        },
        "simulated": {
            "tokens_per_s": row.tokens_per_s,
            "swap_hidden_fraction": row.hidden,
            "peak_device_kv_bytes": row.peak,
        },
        "off": row.off,
        "skipped": row.skipped,
    }


def _cells(row: Compared) -> list[str]:
    found, off = row.measured, row.off
    return [
        found.workload,
        found.system,
        f"{found.tokens_per_s:.1f}",
        _text(row.tokens_per_s, "{:.1f}"),
        _text(off["tokens_per_s"], "{:+.0%}"),
        _text(found.hidden, "{:.0%}"),
        _text(row.hidden, "{:.0%}"),
        _text(found.peak and found.peak / 1e9, "{:.2f}"),
        _text(row.peak and row.peak / 1e9, "{:.2f}"),
        _text(off["peak"], "{:+.0%}"),
        row.skipped or "",
    ]


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
