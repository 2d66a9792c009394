"""Compressors side by side, and one run against another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vericache_conform.outcome import Result
from vericache_conform.report.model import Report

RANK = {"certified": 0, "passed": 1, "failed": 2}


def leaderboard(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """A row per compressor and report: trust first, then acceptance, then bytes."""
    rows = []
    for report in reports:
        for name in report.subjects:
            counts = report.counts(name)
            speed = measured(report.of(name))
            rows.append(
                {
                    "compressor": name,
                    "level": report.level(name),
                    "acceptance": speed.get("acceptance"),
                    "bytes_share": speed.get("bytes_share"),
                    "compress_ms": speed.get("compress_ms"),
                    "passed": counts["pass"],
                    "failed": counts["fail"] + counts["error"] + counts["xpass"],
                    "skipped": counts["skip"] + counts["xfail"],
                }
            )
    return sorted(rows, key=lambda row: (RANK[row["level"]], -(row["acceptance"] or 0.0), row["bytes_share"] or 1.0))


def measured(results: Sequence[Result]) -> dict[str, Any]:
    """Acceptance and bytes of one compressor: from the real model, else from the checks on models with random weights."""
    found: dict[str, Any] = {}
    for id_ in ("R-08", "P-01", "M-01"):  # the later ones are closer to real use
        for result in results:
            if result.check == id_:
                found |= {key: value for key, value in result.facts.items() if value is not None}
    seconds = found.get("compress_seconds")
    if isinstance(seconds, (int, float)):
        found["compress_ms"] = round(1000 * seconds, 2)
    return found


def changes(before: Report, after: Report) -> list[dict[str, Any]]:
    """Checks whose outcome differs between two reports, for compressors that are in both."""
    found = []
    for name in before.subjects:
        old = {result.check: result for result in before.of(name)}
        for result in after.of(name):
            former = old.get(result.check)
            if former is not None and former.outcome != result.outcome:
                worse = result.bad and not former.bad
                found.append(
                    {
                        "compressor": name,
                        "check": result.check,
                        "before": former.outcome,
                        "after": result.outcome,
                        "message": result.message,
                        "worse": worse,
                    }
                )
    return found
