"""``vericache-conform explain ID``."""

from __future__ import annotations

import argparse
import textwrap

from vericache_conform.catalogue import find_check
from vericache_conform.cli.list import described
from vericache_core.cli.output import print_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("ids", nargs="+", metavar="ID", help="of a check, such as C-09")
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    """Print everything there is to know about checks."""
    from vericache_conform.mutants.catalogue import MUTANTS

    checks = [find_check(name) for name in args.ids]
    killed = {check.id: [mutant.name for mutant in MUTANTS.values() if check.id in mutant.caught_by] for check in checks}
    if args.json:
        print_json("vericache-conform.explain/1", {"checks": [{**described(c), "mutants": killed[c.id]} for c in checks]})
        return 0
    for number, check in enumerate(checks):
        print(("\n" if number else "") + f"{check.id}  {check.title}")
        print(
            f"  tier {check.tier}, capability {check.capability}, for {', '.join(sorted(check.kinds))}, about {check.cost:g} s"
        )
        mutants = ", ".join(killed[check.id]) or "none"
        for name, text in (("why", check.rationale), ("origin", check.origin), ("fix", check.fix), ("mutants", mutants)):
            print(textwrap.fill(text, 100, initial_indent=f"  {name + ':':9}", subsequent_indent=" " * 11))
    return 0
