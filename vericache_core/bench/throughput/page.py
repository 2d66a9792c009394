"""One self-contained page: the table, throughput against context, and what happened inside of one run of each system."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

from vericache_core.bench.throughput.measured import Trace
from vericache_core.bench.throughput.rows import Record
from vericache_core.bench.throughput.svg import WIDTH, Series, Span, lanes, plot
from vericache_core.bench.throughput.table import HEADER, LEGEND, cells

STYLE: Final = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 sans-serif; max-width: 84rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; } td, th { padding: .25rem .6rem; text-align: left; vertical-align: top;
border-bottom: 1px solid #8884; } .bad { color: #dc2626; font-weight: bold; } .plots { display: flex; flex-wrap: wrap;
gap: 1rem; } svg { max-width: 100%; height: auto; }
"""
PHASES: Final = {
    "prefill": "#94a3b8",
    "decode": "#0891b2",
    "draft": "#2563eb",
    "verify": "#d97706",
    "background": "#fcd34d",
    "swap": "#dc2626",
}
"""Colours; ``background`` is a verify that ran beside the steps of others."""
TIERS: Final = ("device", "host", "disk")


def html_page(head: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], records: Sequence[Record]) -> str:
    """The whole document; it loads nothing and runs nothing."""
    parts = ["<h1>Throughput</h1>", _table(rows), f"<p>{escape(LEGEND)}</p>", _context(rows)]
    parts += [_inside(record, trace) for record in records if (trace := _trace(record)) is not None]
    conditions = "".join(f"<tr><td>{escape(key)}</td><td>{escape(str(value))}</td></tr>" for key, value in head.items())
    parts.append(f"<h2>Conditions</h2><table>{conditions}</table>")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>VeriCache: throughput</title><style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in HEADER)]
    for row in rows:
        bad = ' class="bad"' if row["lossless"] and row["identical"] is False else ""
        lines.append("".join(f"<td{bad}>{escape(cell)}</td>" for cell in cells(row)))
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _context(rows: Sequence[Mapping[str, Any]]) -> str:
    """Throughput against context; workloads with a cap on device KV are drawn apart."""
    drawn = []
    for capped, title in ((False, "Throughput against context"), (True, "Throughput against context, device KV capped")):
        series: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row["tokens_per_s"]["median"] is not None and (row["budget_share"] is not None) == capped:
                place = (statistics.mean(row["prompt_tokens"]), row["tokens_per_s"]["median"])
                series.setdefault(row["system"], []).append(place)
        if series:
            found = [Series(name, sorted(points)) for name, points in series.items()]
            drawn.append(plot(title, "mean prompt tokens", "tokens/s", found))
    return f'<div class="plots">{"".join(drawn)}</div>'


def _trace(record: Record) -> Trace | None:
    return next((run.trace for _, run in sorted(record.runs.items()) if run.trace is not None and run.trace.phases), None)


def _inside(record: Record, trace: Trace) -> str:
    drawn = [_timeline(trace)]
    if trace.windows:
        drawn.append(_windows(trace))
    if trace.memory:
        drawn.append(_memory(trace))
    title = escape(f"{record.workload}: {record.system}")
    return f'<details><summary>{title}</summary><div class="plots">{"".join(drawn)}</div></details>'


def _timeline(trace: Trace) -> str:
    count = 1 + max(number for _, _, number, _ in trace.phases)
    unseen = max(end for _, end, _, _ in trace.phases) / (2 * WIDTH)
    spans: list[Span] = []
    newest: dict[int, int] = {}
    for start, end, number, phase in trace.phases:
        at = newest.get(number)
        # Steps of one phase in a row are one bar, where no gap could be seen: a page of thousands of bars would not open.
        if at is not None and spans[at].kind == phase and start - spans[at].end < unseen:
            spans[at] = Span(number, spans[at].start, end, phase)
        else:
            newest[number] = len(spans)
            spans.append(Span(number, start, end, phase))
    spans += _merged_swaps(trace)
    return lanes("Steps and swaps of each request", "seconds", [f"request {n + 1}" for n in range(count)], spans, PHASES)


def _merged_swaps(trace: Trace) -> list[Span]:
    spans: list[Span] = []
    for number in sorted({number for _, _, number in trace.swaps}):
        for start, end in ((a, b) for a, b, other in trace.swaps if other == number):
            if spans and spans[-1].lane == number and start - spans[-1].end < 1e-3:
                spans[-1] = Span(number, spans[-1].start, end, "swap", thin=True)
            else:
                spans.append(Span(number, start, end, "swap", thin=True))
    return spans


def _windows(trace: Trace) -> str:
    numbers = sorted({number for _, number, _, _ in trace.windows})
    series = [
        Series(f"request {number + 1}", [(at, drafted) for at, other, drafted, _ in trace.windows if other == number])
        for number in numbers
    ]
    return plot("Tokens drafted before each verify", "seconds", "drafted", series)


def _memory(trace: Trace) -> str:
    series = [
        Series(tier, [(sample[0], sample[1 + at] / 1e6) for sample in trace.memory])
        for at, tier in enumerate(TIERS)
        if any(sample[1 + at] for sample in trace.memory)
    ]
    return plot("KV by tier", "seconds", "MB", series, dots=False)
