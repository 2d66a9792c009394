"""Rows as text: cells for a terminal, a Markdown table, and what the columns mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from vericache_core.sizes import size

HEADER: Final = [
    "WORKLOAD",
    "SYSTEM",
    "TOK/S",
    "MIN..MAX",
    "xPLAIN",
    "STEP",
    "SAME",
    "DEVICE KV",
    "TRANSIENT",
    "HIDDEN",
    "ACCEPTED",
    "PREFILL",
    "NOTE",
]
LEGEND: Final = (
    "TOK/S: tokens of all requests per second of decoding, median over the repetitions; prefill and compression are not in "
    "it. xPLAIN: over the median of the same engine without drafts. STEP: decoding time over forwards of the model. SAME: "
    "every token of every repetition equals plain's; else the earliest one that differs, and how many requests are the same. "
    "DEVICE KV: most bytes of KV on the device at once. TRANSIENT: most bytes of slots that swapped KV streams through, which "
    "are part of it, and how many layers of full KV that is for each request that swapped then. HIDDEN: share of the time of "
    "swaps in which nothing waited for them. ACCEPTED: share of drafted tokens that the full KV agreed with. PREFILL: seconds "
    "for all prompts, once."
)


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row in the order of the header."""
    rate, first = row["tokens_per_s"], row["first_difference"]
    share = f"{row['identical_requests']}/{row['requests']}" if row["identical"] is False else ""
    same = {None: "-", True: "yes", False: f"no ({share})" if first is None else f"no (from {first}; {share})"}[
        row["identical"]
    ]
    remarks = [*([row["error"]] if row["error"] else []), *row["notes"]]
    if row["within_budget"] is False:
        remarks.insert(0, "device KV above its cap")
    return [
        row["workload"],
        row["system"],
        figure(rate["median"], "{:.1f}"),
        "-" if rate["min"] is None else f"{rate['min']:.1f}..{rate['max']:.1f}",
        figure(row["speedup_vs_plain"], "{:.2f}"),
        "-" if row["step_seconds"]["median"] is None else f"{1e3 * row['step_seconds']['median']:.1f} ms",
        same,
        "-" if row["peak_device_kv_bytes"] is None else size(row["peak_device_kv_bytes"]),
        _transient(row["peak_transient_bytes"], row["transient_layers_per_request"]),
        figure(row["swap_hidden_fraction"], "{:.0%}"),
        figure(row["acceptance"], "{:.0%}"),
        figure(row["prefill_seconds"], "{:.1f} s"),
        "; ".join(remarks),
    ]


def markdown(head: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Table, legend and conditions."""
    lines = ["| " + " | ".join(HEADER) + " |", "|" + "---|" * len(HEADER)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells(row)) + " |" for row in rows]
    conditions = ", ".join(f"{key} {value}" for key, value in head.items() if value is not None)
    return "\n".join([*lines, "", LEGEND, "", f"Conditions: {conditions}.", ""])


def _transient(nbytes: int | None, layers: float | None) -> str:
    return "-" if nbytes is None or layers is None else f"{size(nbytes)} ({layers:.1f} layers)"


def figure(value: float | None, form: str) -> str:
    """A number, or a dash."""
    return "-" if value is None else form.format(value)
