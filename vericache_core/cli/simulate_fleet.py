"""``vericache simulate --drafters``: drafters behind slow links and a store that verifies, swept over both.

Two baselines decode plainly: the best mix of devices, and requests dealt out evenly to all of them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from vericache_core.cli.output import print_json, print_table
from vericache_core.errors import UsageError
from vericache_core.runtime.costs import Link
from vericache_core.runtime.trace import Arrival
from vericache_core.simulate.compare import Setup
from vericache_core.simulate.fleet import PATHS, PLAIN, Fleet, Path, even_plan
from vericache_core.simulate.remote import FleetResult, mean_lengths, simulate_fleet

SCHEMA: Final = "vericache.simulate.fleet/1"
MOST_DRAFTERS: Final = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what is of this scenario alone."""
    group = parser.add_argument_group("remote scenario", "with --drafters; --keep and --swap say what crosses the slow links")
    group.add_argument(
        "--drafters", metavar="N[,N...]", help="drafting devices for each store, every one behind a link of its own"
    )
    group.add_argument("--slow-link", default="1.2", metavar="GB/S[,...]", help="store to a drafter [%(default)s]")
    group.add_argument("--fast-link", default="40", metavar="GB/S[,...]", help="store to the device beside it [%(default)s]")
    group.add_argument("--latency", type=float, default=5.0, metavar="MS", help="one way, of the slow links [%(default)g]")
    group.add_argument(
        "--sharing", type=int, default=1, metavar="N", help="requests in a row with the same prompt [%(default)s]"
    )
    group.add_argument(
        "--scatter", action="store_true", help="send requests of one prompt to any drafter, not all to the first one's"
    )
    group.add_argument("--paths", metavar="NAME[,...]", help=f"that may be taken, of {', '.join(PATHS)} [all]")
    group.add_argument("--expanded", action="store_true", help="draft KV takes as much memory as full KV")


def run(args: argparse.Namespace, setup: Setup, model: str, device: str) -> int:
    """Simulate each combination, with and without drafts."""
    rows = []
    for slow in _numbers(args.slow_link, "--slow-link"):
        for fast in _numbers(args.fast_link, "--fast-link"):
            for count in _counts(args.drafters):
                fleet = _fleet(args, setup, count, slow, fast)
                plain = simulate_fleet(replace(fleet, paths=PLAIN), setup.arrivals, setup.seed)
                even = simulate_fleet(fleet, setup.arrivals, setup.seed, even_plan(fleet, *mean_lengths(setup.arrivals)))
                drafted = simulate_fleet(fleet, setup.arrivals, setup.seed)
                ratio = load_to_round(fleet, setup.arrivals, drafted.plan.window)
                rows.append(_row(count, slow, fast, ratio, plain, even, drafted))
    if args.json:
        facts = {"model": model, "device": device, "requests": len(setup.arrivals), "seed": setup.seed, "sharing": args.sharing}
        print_json(SCHEMA, {**facts, "rows": rows})
    else:
        header = [
            "DRAFTERS",
            "SLOW GB/S",
            "FAST GB/S",
            "LOAD/ROUND",
            "WINDOW",
            "PLAIN TOK/S",
            "TOK/S",
            "SPEEDUP",
            "STEADY",
            "PLANNED",
            "VS EVEN",
            "PATHS",
        ]
        print_table(header, [_cells(row) for row in rows])
    return 0


def load_to_round(fleet: Fleet, arrivals: Sequence[Arrival], window: int) -> float | None:
    """Time of the full KV over the slow link by that of one window of drafts on a device full of them; None without drafts."""
    if not window:
        return None
    from vericache_core.simulate.fleet import draft_step_seconds

    prompt, new = mean_lengths(arrivals)
    return fleet.slow.seconds(fleet.full_bytes(prompt)) / (window * draft_step_seconds(fleet, prompt, new))


def _fleet(args: argparse.Namespace, setup: Setup, drafters: int, slow: float, fast: float) -> Fleet:
    if not args.latency >= 0 or args.sharing < 1:
        raise UsageError("--latency is 0 or more and --sharing 1 or more")
    if setup.window is not None and setup.window < 1:
        raise UsageError("--window: the remote scenario drafts at least 1 token", hint="--paths remote,fetch drafts nothing")
    return Fleet(
        drafters,
        setup.costs,
        setup.token_bytes,
        setup.budget.device,
        Link(args.latency / 1e3, 1 / (slow * 1e9)),
        Link(1e-4, 1 / (fast * 1e9)),
        setup.compression,
        args.expanded,
        setup.window,
        args.sharing,
        not args.scatter,
        _paths(args.paths),
    )


def _paths(text: str | None) -> tuple[Path, ...]:
    if text is None:
        return PATHS
    names = text.split(",")
    unknown = [name for name in names if name not in PATHS]
    if unknown:
        raise UsageError(f"--paths: unknown path {unknown[0]!r}", hint=f"known: {', '.join(PATHS)}")
    return tuple(path for path in PATHS if path in names)


def _counts(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and 1 <= int(part) <= MOST_DRAFTERS for part in parts):
        raise UsageError(f"--drafters: expected numbers from 1 to {MOST_DRAFTERS} with commas between them, got {text!r}")
    return [int(part) for part in parts]


def _numbers(text: str, name: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < float("inf") for number in numbers):
        raise UsageError(f"{name}: expected numbers above 0 with commas between them, got {text!r}")
    return numbers


def _row(
    count: int, slow: float, fast: float, ratio: float | None, plain: FleetResult, even: FleetResult, drafted: FleetResult
) -> dict[str, Any]:
    return {
        "drafters": count,
        "slow_bytes_per_s": slow * 1e9,
        "fast_bytes_per_s": fast * 1e9,
        "load_to_round": ratio,
        "window": drafted.plan.window,
        "plain_tokens_per_s": plain.tokens_per_s,
        "tokens_per_s": drafted.tokens_per_s,
        "speedup": drafted.tokens_per_s / plain.tokens_per_s,
        "steady_speedup": drafted.steady_tokens_per_s / plain.steady_tokens_per_s if plain.steady_tokens_per_s else None,
        "planned_speedup": drafted.plan.rate / plain.plan.rate,
        "even_tokens_per_s": even.tokens_per_s,
        "speedup_vs_even": drafted.tokens_per_s / even.tokens_per_s,
        "planned_speedup_vs_even": drafted.plan.rate / even.plan.rate,
        "paths": dict(drafted.paths),
        "acceptance": drafted.accepted / drafted.drafted if drafted.drafted else None,
        "verifies": drafted.verifies,
        "slow_bytes": drafted.slow_bytes,
        "fast_bytes": drafted.fast_bytes,
        "busy": drafted.busy,
        "first_token_p50_s": sorted(drafted.first_tokens)[len(drafted.first_tokens) // 2],
        "latency_p50_s": sorted(drafted.latencies)[len(drafted.latencies) // 2],
        "tokens": drafted.tokens,
        "seconds": drafted.seconds,
    }


def _cells(row: dict[str, Any]) -> list[str]:
    total = sum(row["paths"].values())
    return [
        str(row["drafters"]),
        f"{row['slow_bytes_per_s'] / 1e9:g}",
        f"{row['fast_bytes_per_s'] / 1e9:g}",
        f"{row['load_to_round']:.1f}" if row["load_to_round"] else "-",
        str(row["window"]),
        f"{row['plain_tokens_per_s']:.0f}",
        f"{row['tokens_per_s']:.0f}",
        f"{row['speedup']:.2f}x",
        f"{row['steady_speedup']:.2f}x" if row["steady_speedup"] else "-",
        f"{row['planned_speedup']:.2f}x",
        f"{row['speedup_vs_even']:.2f}x",
        " ".join(
            f"{path} {100 * count / total:.0f}%" for path, count in sorted(row["paths"].items(), key=lambda item: -item[1])
        ),
    ]
