"""How good: reported always, gated only by what the author declares."""

from __future__ import annotations

import statistics
import time
from typing import Any

from vericache_conform.bench import Bench, greedy
from vericache_conform.case import Case
from vericache_conform.check import check
from vericache_conform.outcome import Evidence, Failure
from vericache_conform.world import World


@check(
    "P-01",
    tier="perf",
    cost=12.0,
    rationale="Two compressors that are both right differ in speed. Numbers belong beside the verdict, and an author's promise "
    "should be kept.",
    origin="kvpress's leaderboard; #87.",
    fix="Raise acceptance, or lower `min_acceptance` and `max_bytes_share` in `[declared]` of conformance.toml.",
)
def performance(case: Case) -> Evidence:
    """Acceptance, bytes per token and compress time are reported, and kept above what the author declares."""
    bench = Bench(case)
    drafted = accepted = 0
    share, per_token = 1.0, 0.0
    for number in range(4):
        prompt = bench.prompt(bench.long + 8 * number, number)
        with bench.engine() as engine:
            metrics = bench.run(engine, prompt, greedy(48)).metrics
        if metrics.degraded:
            raise Failure(f"the compressor was given up: {metrics.degraded[0]}")
        drafted, accepted = drafted + metrics.drafted, accepted + metrics.accepted
        share = metrics.compressed_kv_bytes / max(1, metrics.compressed_from_bytes)
        per_token = metrics.compressed_kv_bytes / len(prompt)
    facts: dict[str, Any] = {
        "acceptance": round(accepted / max(1, drafted), 4),
        "bytes_share": round(share, 4),
        "bytes_per_token": round(per_token, 1),
        "compress_seconds": _compress_seconds(case),
    }
    floor, ceiling = case.declared.get("min_acceptance"), case.declared.get("max_bytes_share")
    if floor is not None and facts["acceptance"] < floor:
        raise Failure(f"acceptance is {facts['acceptance']}, at least {floor} is declared", facts=facts)
    if ceiling is not None and facts["bytes_share"] > ceiling:
        raise Failure(f"{facts['bytes_share']} of the bytes are kept, at most {ceiling} is declared", facts=facts)
    return Evidence(4, facts)


def _compress_seconds(case: Case) -> float:
    """Median of five, for 2048 tokens of a made-up layer pair."""
    compressor = case.create()
    world = World(case.layers(), 2048, case.seed)
    taken = []
    for _ in range(5):
        started = time.perf_counter()
        case.compress(compressor, world, 2048)
        taken.append(time.perf_counter() - started)
    return round(statistics.median(taken), 5)
