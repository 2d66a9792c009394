"""Runs of one system on one workload -> one row of the table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vericache_core.bench.throughput.measured import Measured

PLAIN = "plain"
"""The system that the others are compared with: our engine with the full KV, no drafts."""


@dataclass
class Record:
    """All runs of one system on one workload, and why there are none or no more; ``place`` is the system's in the table."""

    system: str
    workload: str
    lossless: bool
    place: int = 0
    facts: Mapping[str, Any] = field(default_factory=dict)
    runs: dict[int, Measured] = field(default_factory=dict)
    problem: str | None = None
    skipped: bool = False


def row(record: Record, plain: Record | None) -> dict[str, Any]:
    """The row as JSON types; figures that could not be had are ``None``."""
    runs = [record.runs[repetition] for repetition in sorted(record.runs)]
    rates = [run.tokens_per_s for run in runs]
    base = [] if plain is None else [run.tokens_per_s for run in plain.runs.values()]
    reference = next(iter(plain.runs.values())).tokens if plain is not None and plain.runs else None
    drafted = [run.drafted for run in runs if run.drafted is not None]
    accepted = sum(run.accepted or 0 for run in runs)
    peaks = [run.peak_device_kv_bytes for run in runs if run.peak_device_kv_bytes is not None]
    transient, layers = max(
        ((run.peak_transient_bytes, run.transient_layers_per_request) for run in runs if run.peak_transient_bytes is not None),
        key=lambda moment: (moment[0], moment[1] or 0.0),
        default=(None, None),
    )
    within = [run.within_budget for run in runs if run.within_budget is not None]
    return {
        "system": record.system,
        "workload": record.workload,
        "tokens_per_s": _spread(rates),
        "speedup_vs_plain": statistics.median(rates) / statistics.median(base) if rates and base else None,
        "identical": None if reference is None or not runs else all(run.tokens == reference for run in runs),
        "peak_device_kv_bytes": max(peaks, default=None),
        "swap_hidden_fraction": _median(run.swap_hidden_fraction for run in runs),
        "peak_transient_bytes": transient,
        "transient_layers_per_request": layers,
        "lossless": record.lossless,
        "runs": len(runs),
        **record.facts,
        "first_difference": None if reference is None or not runs else first_difference(runs[0].tokens, reference),
        "identical_requests": None if reference is None or not runs else min(_same(run.tokens, reference) for run in runs),
        "decoded_tokens": runs[0].decoded if runs else None,
        "decode_seconds": _spread([run.decode_seconds for run in runs]),
        "step_seconds": _spread([run.decode_seconds / run.steps for run in runs if run.steps]),
        "prefill_seconds": _median(run.prefill_seconds for run in runs),
        "compress_seconds": _median(run.compress_seconds for run in runs),
        "steps": runs[0].steps if runs else None,
        "drafted": sum(drafted) if drafted else None,
        "acceptance": accepted / sum(drafted) if sum(drafted) else None,
        "swap_bytes": _median(run.swap_bytes for run in runs),
        "swap_seconds": _median(run.swap_seconds for run in runs),
        "device_budget_bytes": next((run.device_budget_bytes for run in runs if run.device_budget_bytes is not None), None),
        "within_budget": all(within) if within else None,
        "notes": list(dict.fromkeys(note for run in runs for note in run.notes)),
        "skipped": record.skipped,
        "error": record.problem,
    }


def first_difference(tokens: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> int | None:
    """Earliest index at which an output differs from its reference; ``None`` when none does."""
    found = []
    for ours, theirs in zip(tokens, reference, strict=False):
        shared = next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
        if shared < max(len(ours), len(theirs)):
            found.append(shared)
    return min(found, default=None)


def _same(tokens: Sequence[Sequence[int]], reference: Sequence[Sequence[int]]) -> int:
    """How many requests have every token of their reference."""
    return sum(list(ours) == list(theirs) for ours, theirs in zip(tokens, reference, strict=False))


def broken(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a system that promises plain's tokens gave other ones, or failed to give any."""
    return any(one["lossless"] and (one["identical"] is False or (one["error"] and not one["skipped"])) for one in rows)


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"median": None, "min": None, "max": None}
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _median(values: Any) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None
