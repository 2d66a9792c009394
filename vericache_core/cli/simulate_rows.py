"""What ``vericache simulate`` prints of a run: a row of numbers, and its cells in the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from vericache_core.simulate.compare import Setup
from vericache_core.simulate.result import Result

HEADER: Final = [
    "DEVICE",
    "SYSTEM",
    "TOKENS/S",
    "SPEEDUP",
    "WINDOW",
    "HIDDEN",
    "PEAK KV GB",
    "STEP MS",
    "TTFT p50",
    "LATENCY p50",
    "p90",
    "p99",
]


def row(device: str, system: str, result: Result, plain: Result, setup: Setup, weights: float) -> dict[str, Any]:
    """Return what a run of ``system`` gave beside the ``plain`` one, as JSON types; ``weights`` in bytes."""
    return {
        "device": device,
        "system": system,
        "tokens_per_s": result.tokens_per_s,
        "speedup_vs_plain": result.tokens_per_s / plain.tokens_per_s if plain.tokens_per_s else None,
        "mean_window": result.mean_window,
        "acceptance": result.accepted / sum(result.windows) if result.windows else None,
        "proposed": result.proposed,
        "proposals_kept": result.proposals_kept,
        "swap_bytes": result.swap_bytes,
        "swap_hidden_fraction": result.swap_hidden_fraction,
        "peak_device_kv_bytes": result.peak_kv_bytes,
        "device_kv_budget_bytes": setup.budget.device,
        "weight_bytes": weights,
        "step_s": {
            "draft": _mean(result.draft_steps),
            "mixed": _mean(result.mixed_steps),
            "verify": max(result.verify_steps, default=None),
        },
        "first_token_s": _percentiles(result.first_tokens),
        "latency_s": _percentiles(result.latencies),
        "seconds": result.seconds,
        "tokens": result.tokens,
        "refused": result.refused,
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    ranked = sorted(values)
    return {f"p{share}": ranked[min(len(ranked) - 1, len(ranked) * share // 100)] for share in (50, 90, 99)} if ranked else {}


def cells(row: dict[str, Any]) -> list[str]:
    """Return the row as the table shows it."""
    hidden, latency = row["swap_hidden_fraction"], row["latency_s"]
    return [
        row["device"],
        row["system"],
        f"{row['tokens_per_s']:.1f}",
        f"{row['speedup_vs_plain']:.2f}x" if row["speedup_vs_plain"] else "-",
        f"{row['mean_window']:.1f}" if row["mean_window"] else "-",
        "-" if hidden is None else f"{100 * hidden:.0f}%",
        f"{row['peak_device_kv_bytes'] / 1e9:.2f}",
        " ".join("-" if seconds is None else f"{1e3 * seconds:.0f}" for seconds in row["step_s"].values()),
        f"{row['first_token_s'].get('p50', 0):.1f}",
        *(f"{latency.get(key, 0):.1f}" for key in ("p50", "p90", "p99")),
    ]
