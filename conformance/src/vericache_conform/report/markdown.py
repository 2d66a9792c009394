"""Markdown, for pull requests and documentation."""

from __future__ import annotations

from vericache_conform.report.compare import leaderboard
from vericache_conform.report.model import Report
from vericache_conform.report.terminal import one_line


def markdown(report: Report) -> str:
    """Verdict, leaderboard, every check that is no plain pass, and where it ran."""
    header = report.header
    lines = ["# Conformance report", "", f"**{report.summary()}**", ""]
    lines += ["| compressor | level | acceptance | bytes kept | passed | failed | skipped |", "|---|---|---|---|---|---|---|"]
    for row in leaderboard([report]):
        cells = [row[key] for key in ("compressor", "level", "acceptance", "bytes_share", "passed", "failed", "skipped")]
        lines.append("| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |")
    for name in report.subjects:
        lines += ["", f"## {name}", "", "| check | outcome | message |", "|---|---|---|"]
        rows = [result for result in report.of(name) if result.outcome != "pass"]
        lines += [f"| {r.check} | {r.outcome} | {one_line(r.message).replace('|', chr(92) + '|')} |" for r in rows]
        lines += [] if rows else ["| all | pass | |"]
    lines += ["", f"vericache-conform {header.get('suite')}, core {header.get('core')}, Python {header.get('python')},"]
    packages = ", ".join(f"{name} {version}" for name, version in header.get("packages", {}).items() if version)
    lines += [f"{header.get('platform')}, {packages}, seed {header.get('seed')}", ""]
    return "\n".join(lines)
