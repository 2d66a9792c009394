"""``vericache-conform list``."""

from __future__ import annotations

import argparse
from typing import Any

from vericache_conform.catalogue import all_checks
from vericache_conform.check import TIERS, Check
from vericache_core.cli.output import print_json, print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--tier", action="append", choices=TIERS, help="only these tiers (repeatable)")
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    """Print the checks."""
    checks = [check for check in all_checks().values() if not args.tier or check.tier in args.tier]
    if args.json:
        print_json("vericache-conform.list/1", {"checks": [described(check) for check in checks]})
    else:
        rows = [[check.id, check.tier, check.capability, f"{check.cost:g}s", check.title] for check in checks]
        print_table(["ID", "TIER", "CAPABILITY", "COST", "PROMISE"], rows)
    return 0


def described(check: Check) -> dict[str, Any]:
    """A check in JSON types."""
    return {
        "id": check.id,
        "title": check.title,
        "tier": check.tier,
        "capability": check.capability,
        "kinds": sorted(check.kinds),
        "rationale": check.rationale,
        "origin": check.origin,
        "fix": check.fix,
        "cost": check.cost,
        "timeout": check.timeout,
    }
