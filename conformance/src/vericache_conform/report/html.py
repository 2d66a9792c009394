"""One self-contained page: verdict, tables, plots. It loads nothing and runs nothing."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any, Final

from vericache_conform.report.compare import leaderboard
from vericache_conform.report.model import Report
from vericache_conform.report.svg import Series, bars, scatter, timeline
from vericache_conform.report.terminal import one_line

STYLE: Final = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; } td, th { padding: .25rem .6rem; text-align: left; vertical-align: top;
border-bottom: 1px solid #8884; } .pass { color: #059669; } .fail, .error, .xpass { color: #dc2626; font-weight: bold; }
.skip, .xfail { color: #b45309; } .plots { display: flex; flex-wrap: wrap; gap: 1rem; } code { font-size: .9em; }
"""


def html_page(report: Report) -> str:
    """The whole report as one HTML document."""
    parts = [f"<h1>Conformance report</h1><p><strong>{escape(report.summary())}</strong></p>", _board(report)]
    parts += [f'<div class="plots">{"".join(plots(report))}</div>']
    parts += [_subject(report, name) for name in report.subjects]
    parts.append(_place(report.header))
    title = escape("Conformance: " + ", ".join(report.subjects))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def plots(report: Report) -> list[str]:
    """Acceptance against bytes, acceptance by position, margins of rejections, and a timeline per compressor."""
    drawn: list[str] = []
    cloud, curves = [], []
    for name in report.subjects:
        facts = _speed(report, name)
        points = [p for p in facts.get("points", []) if p.get("acceptance") is not None]
        if points:
            places = [(p["bytes_share"], p["acceptance"]) for p in points]
            cloud.append(Series(name, places, [str(p.get("options") or "defaults") for p in points]))
        by_position = facts.get("acceptance_by_position", [])
        if by_position:
            curves.append(Series(name, [(at + 1.0, share) for at, share in enumerate(by_position)]))
    if cloud:
        drawn.append(scatter("Acceptance against bytes", "bytes kept (share)", "acceptance", cloud))
    if curves:
        drawn.append(scatter("Acceptance by position in the window", "position", "accepted share", curves, joined=True))
    for name in report.subjects:
        facts = _speed(report, name)
        histogram = facts.get("margin_histogram")
        if histogram:
            labels, counts = histogram["labels"], histogram["counts"]
            drawn.append(
                bars(f"{name}: top-2 margin of the full cache where drafts were rejected", "margin", "tokens", labels, counts)
            )
        if facts.get("drafted_per_round"):
            drawn.append(
                timeline(f"{name}: draft and verify, round by round", facts["drafted_per_round"], facts["accepted_per_round"])
            )
    return drawn


def _speed(report: Report, name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for result in report.of(name):
        if result.check in ("R-08", "P-01"):
            found |= dict(result.facts)
    return found


def _board(report: Report) -> str:
    columns = ("compressor", "level", "acceptance", "bytes_share", "compress_ms", "passed", "failed", "skipped")
    rows = [[("" if row[c] is None else str(row[c])) for c in columns] for row in leaderboard([report])]
    return _table([column.replace("_", " ") for column in columns], rows)


def _subject(report: Report, name: str) -> str:
    from vericache_conform.catalogue import all_checks

    checks = all_checks()
    lines = []
    for result in report.of(name):
        title = checks[result.check].title if result.check in checks else ""
        more = f"<br><code>{escape(result.reproduce)}</code>" if result.bad and result.reproduce else ""
        example = f"<br><code>{escape(str(dict(result.example)))}</code>" if result.example else ""
        lines.append(
            f'<tr><td>{result.check}</td><td class="{result.outcome}">{result.outcome}</td><td>{escape(title)}</td>'
            f"<td>{escape(one_line(result.message))}{example}{more}</td></tr>"
        )
    head = "<tr><th>check</th><th>outcome</th><th>promise</th><th>message</th></tr>"
    return f"<h2>{escape(name)}: {report.level(name)}</h2><table>{head}{''.join(lines)}</table>"


def _place(header: dict[str, Any]) -> str:
    rows = [
        [key, str(header.get(key))]
        for key in ("suite", "core", "api_version", "python", "platform", "seed", "model", "git", "started")
    ]
    rows += [[key, str(value)] for key, value in header.get("packages", {}).items()]
    return "<h2>Where it ran</h2>" + _table(["what", "value"], rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
