"""``vericache simulate --search-windows``: adaptive windows against every static one."""

from __future__ import annotations

import argparse
from typing import Any, Final

from vericache_core.cli.output import print_json, print_table
from vericache_core.errors import UsageError
from vericache_core.simulate.compare import Setup
from vericache_core.simulate.windows import search_windows

SCHEMA: Final = "vericache.simulate.windows/1"
SEEDS: Final = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what is of this search alone."""
    parser.add_argument(
        "--search-windows",
        action="store_true",
        help=f"compare adaptive windows with each static one, 0 to 64, over {SEEDS} seeds",
    )


def run(args: argparse.Namespace, setup: Setup, model: str, device: str) -> int:
    """Search, and print the windows by their speed."""
    if setup.window is not None:
        raise UsageError("--search-windows tries every window", hint="leave --window out")
    if setup.mode == "plain":
        raise UsageError("--search-windows and --mode plain are both given", hint="plain decoding drafts nothing")
    found = search_windows(setup, seeds=range(args.seed, args.seed + SEEDS))
    facts: dict[str, Any] = {"model": model, "device": device, "mode": setup.mode, "seeds": SEEDS}
    if args.json:
        rows = [{"window": window, "tokens_per_s": rate} for window, rate in found.static.items()]
        best = {"best_static": found.best, "adaptive_tokens_per_s": found.adaptive, "adaptive_over_best": found.ratio}
        print_json(SCHEMA, {**facts, **best, "static": rows})
        return 0
    best_rate = found.static[found.best]
    ranked = sorted(found.static.items(), key=lambda item: -item[1])
    lines = [["adaptive", f"{found.adaptive:.1f}", f"{found.ratio:.3f}"]]
    lines += [[str(window), f"{rate:.1f}", f"{rate / best_rate:.3f}"] for window, rate in ranked]
    print_table(["WINDOW", "TOKENS/S", "OF BEST STATIC"], lines)
    return 0
