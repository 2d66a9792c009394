"""One self-contained page: the table, throughput against context, and what happened inside of one run of each system."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

from vericache_core.bench.throughput.measured import Trace
from vericache_core.bench.throughput.rows import Record
from vericache_core.bench.throughput.svg import WIDTH, Bar, Series, Span, bars, lanes, plot
from vericache_core.bench.throughput.table import HEADER, LEGEND, cells

STYLE: Final = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 sans-serif; max-width: 84rem; margin: 2rem auto; padding: 0 1rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; margin: 1rem 0; }
td, th { padding: .25rem .6rem; text-align: left; vertical-align: top; border-bottom: 1px solid #8884; }
.figures { font-size: 14px; } .figures td, .figures th { padding: .25rem .45rem; white-space: nowrap; }
.figures td:nth-child(2), .figures td:last-child { white-space: normal; min-width: 10rem; }
.bad { color: #dc2626; font-weight: bold; } summary { cursor: pointer; }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; align-items: flex-start; } svg { max-width: 100%; height: auto; }
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
INSIDE: Final = (
    "The first repetition. A lane a request: draft, verify, decode and prefill are the steps that had rows of it, background "
    "is a verify that ran beside the steps of others, swap (thin) is a layer of its full KV coming in."
)
TIERS: Final = ("device", "host", "disk")


def html_page(head: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], records: Sequence[Record]) -> str:
    """The whole document; it loads nothing and runs nothing."""
    parts = ["<h1>Throughput</h1>", _table(rows), f"<p>{escape(LEGEND)}</p>"]
    parts.append(f'<div class="plots">{"".join([*_rates(rows), *_context(rows)])}</div>')
    inside = [_inside(record, *traced) for record in records if (traced := _traced(record)) is not None]
    parts += [f"<h2>Inside one run of each system</h2><p>{escape(INSIDE)}</p>", *inside] if inside else []
    conditions = "".join(f"<tr><td>{escape(key)}</td><td>{escape(str(value))}</td></tr>" for key, value in head.items())
    parts.append(f'<h2>Conditions</h2><div class="wide"><table>{conditions}</table></div>')
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>VeriCache: throughput</title><style>{STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = ["".join(f"<th>{escape(cell)}</th>" for cell in HEADER)]
    for row in rows:
        bad = ' class="bad"' if row["lossless"] and row["identical"] is False else ""
        lines.append("".join(f"<td{bad}>{escape(cell)}</td>" for cell in cells(row)))
    return f'<div class="wide"><table class="figures">{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def _measured(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Rows that have a figure, by workload."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["tokens_per_s"]["median"] is not None:
            found.setdefault(row["workload"], []).append(row)
    return found


def _rates(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Systems side by side, a plot for each workload."""
    drawn = []
    for workload, measured in _measured(rows).items():
        values = []
        for row in measured:
            rate, times = row["tokens_per_s"], row["speedup_vs_plain"]
            label = f"{rate['median']:.1f}" + ("" if times is None else f" ({times:.2f}x plain)")
            values.append(Bar(row["system"], rate["median"], rate["min"], rate["max"], label))
        drawn.append(bars(f"{workload}: throughput", "tokens/s, median; the line is from the least to the most", values))
    return drawn


def _context(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Throughput against context, where it varies: of one workload, or of all without a cap on device KV together."""
    measured = _measured(rows)
    plots: dict[str, list[Mapping[str, Any]]] = {}
    varied = any("@" in workload for workload in measured)
    for workload, found in measured.items():
        if varied:
            plots.setdefault(workload.partition("@")[0], []).extend(found)
        elif found[0]["budget_share"] is None:
            plots.setdefault("all workloads without a cap on device KV", []).extend(found)
    drawn = []
    for name, found in plots.items():
        series: dict[str, list[tuple[float, float]]] = {}
        for row in found:
            place = (statistics.mean(row["prompt_tokens"]), row["tokens_per_s"]["median"])
            series.setdefault(row["system"], []).append(place)
        if len({x for points in series.values() for x, _ in points}) > 1:
            lines = [Series(system, sorted(points)) for system, points in series.items()]
            # Two workloads may have prompts of one mean length: a line would go straight up between them.
            joined = all(len({x for x, _ in line.points}) == len(line.points) for line in lines)
            drawn.append(plot(f"Throughput against context: {name}", "mean prompt tokens", "tokens/s", lines, joined=joined))
    return drawn


def _traced(record: Record) -> tuple[Trace, int | None] | None:
    """The first run that tells what happened inside it, and its cap on device KV in bytes."""
    for _, run in sorted(record.runs.items()):
        if run.trace is not None and run.trace.phases:
            return run.trace, run.device_budget_bytes
    return None


def _inside(record: Record, trace: Trace, budget: int | None) -> str:
    drawn = [_timeline(trace)]
    if trace.windows:
        drawn.append(_windows(trace))
    if trace.memory:
        drawn.append(_memory(trace, budget))
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


def _memory(trace: Trace, budget: int | None) -> str:
    series = [
        Series(tier, [(sample[0], sample[1 + at] / 1e6) for sample in trace.memory])
        for at, tier in enumerate(TIERS)
        if any(sample[1 + at] for sample in trace.memory)
    ]
    return plot(
        "KV by tier; the cap is the device's" if budget is not None else "KV by tier",
        "seconds",
        "MB",
        series,
        dots=False,
        cap=None if budget is None else budget / 1e6,
    )
