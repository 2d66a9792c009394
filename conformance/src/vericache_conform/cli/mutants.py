"""``vericache-conform mutants``: the suite tests itself."""

from __future__ import annotations

import argparse
import os
from typing import Any

from vericache_conform.check import TIERS, Tier
from vericache_conform.cli.timeouts import add_timeout_factor, timeout_factor
from vericache_conform.mutants.catalogue import MUTANTS, find_mutant
from vericache_conform.mutants.matrix import Row, run_matrix, survivors, toothless
from vericache_core.cli.output import note, print_json, print_table
from vericache_core.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("names", nargs="*", metavar="MUTANT", help="only these [all]")
    parser.add_argument(
        "--tier",
        action="append",
        choices=TIERS,
        help="which checks (repeatable) [all but model, which needs a real model; --tier model runs just that]",
    )
    parser.add_argument("--list", action="store_true", help="list the mutants and run nothing")
    parser.add_argument("--full", action="store_true", help="the slow tiers on every mutant, not only on those aimed at them")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="mutants at a time, a process each [%(default)s]"
    )
    add_timeout_factor(parser)
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    """Exit 1 if a mutant survives, is caught by a check that is not meant for it, or a check kills nothing."""
    names = [find_mutant(name).name for name in args.names]
    if args.list:
        return _list(names, as_json=args.json)
    tiers: list[Tier] = args.tier or ["static", "contract", "runtime", "perf"]
    if args.jobs < 1:
        raise UsageError("--jobs must be at least 1")
    factor = timeout_factor(args)
    rows = run_matrix(names, tiers, full=args.full, jobs=args.jobs, factor=factor, listen=lambda row: note(_line(row)))
    alive, blunt = survivors(rows), [] if names else toothless(rows)
    good = bool(rows) and not alive and not blunt and all(row.good for row in rows)
    if args.json:
        print_json(
            "vericache-conform.mutants/1",
            {"mutants": [_described(row) for row in rows], "survivors": alive, "checks_that_kill_nothing": blunt, "good": good},
        )
    else:
        table = [
            [r.mutant.name, _verdict(r), f"{r.seconds:.0f} s", " ".join(sorted(r.caught)), _complaint(r) or r.mutant.fault]
            for r in rows
        ]
        print_table(["MUTANT", "VERDICT", "TIME", "CAUGHT BY", "FAULT"], table)
        for check in blunt:
            print(f"{check} kills no mutant")
        killed = sum(bool(row.caught) for row in rows)
        print(f"{killed} mutants killed, {len(alive)} survived, {len(blunt)} checks kill nothing")
    return 0 if good else 1


def _list(names: list[str], *, as_json: bool) -> int:
    chosen = [mutant for mutant in MUTANTS.values() if not names or mutant.name in names]
    if as_json:
        facts = [{"name": m.name, "fault": m.fault, "caught_by": sorted(m.caught_by)} for m in chosen]
        print_json("vericache-conform.mutants.list/1", {"mutants": facts})
    else:
        print_table(["MUTANT", "CAUGHT BY", "FAULT"], [[m.name, " ".join(sorted(m.caught_by)) or "-", m.fault] for m in chosen])
    return 0


def _verdict(row: Row) -> str:
    if not row.good:
        return "WRONG"
    return "ok" if row.tried else "not tried"


def _line(row: Row) -> str:
    return f"{row.mutant.name}: {_verdict(row)} {' '.join(sorted(row.caught))} {_complaint(row)}"


def _complaint(row: Row) -> str:
    parts = []
    if row.missed:
        parts.append(f"not caught by {' '.join(row.missed)}")
    if row.unrelated:
        first = row.unrelated[0]
        parts.append(f"caught by {' '.join(row.unrelated)}, which is not meant for it ({first}: {row.caught[first]})")
    return "; ".join(parts)


def _described(row: Row) -> dict[str, Any]:
    return {
        "name": row.mutant.name,
        "fault": row.mutant.fault,
        "meant": sorted(row.mutant.caught_by),
        "ran": row.ran,
        "caught": row.caught,
        "missed": row.missed,
        "unrelated": row.unrelated,
        "good": row.good,
        "tried": row.tried,
        "seconds": row.seconds,
    }
