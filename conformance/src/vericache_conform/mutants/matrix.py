"""The kill matrix: every mutant against the checks, each in a worker of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock

from vericache_conform.catalogue import all_checks
from vericache_conform.check import Check, Tier
from vericache_conform.execute import Settings
from vericache_conform.isolation import DEFAULT_MEMORY, Worker
from vericache_conform.mutants.catalogue import MUTANTS, Mutant

CONTAINED_FACTOR = 0.25
"""Mutants that hang are given a quarter of the usual time."""


@dataclass
class Row:
    """One mutant: what it should be caught by, what ran and for how long, and what caught it."""

    mutant: Mutant
    ran: list[str] = field(default_factory=list)
    caught: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def missed(self) -> list[str]:
        """Checks that are meant for it, ran, and did not catch it."""
        return [check for check in sorted(self.mutant.caught_by) if check in self.ran and check not in self.caught]

    @property
    def unrelated(self) -> list[str]:
        """Checks that caught it without being meant for it."""
        return sorted(set(self.caught) - self.mutant.caught_by)

    @property
    def good(self) -> bool:
        return not self.missed and not self.unrelated

    @property
    def tried(self) -> bool:
        """Whether a check that is meant for it ran (the chosen tiers may hold none); a healthy one is always tried."""
        return not self.mutant.caught_by or bool(self.mutant.caught_by & set(self.ran))


def checks_for(mutant: Mutant, tiers: Sequence[Tier], *, full: bool = False) -> list[Check]:
    """Checks that are tried on a mutant: all of the static and contract tiers, and those of the slow tiers if it aims there.

    A mutant that hangs or crashes is tried on the checks meant for it only: every other would be caught as well.
    """
    found = [check for check in all_checks().values() if check.tier in tiers]
    if mutant.contained:
        return [check for check in found if check.id in mutant.caught_by]
    aims = {all_checks()[check].tier for check in mutant.caught_by} - {"model"}
    quick = ("static", "contract")
    return [check for check in found if full or check.tier in quick or check.tier in aims or check.id in mutant.caught_by]


def run_matrix(
    names: Iterable[str] = (),
    tiers: Sequence[Tier] = ("static", "contract", "runtime", "perf"),
    *,
    only_meant: bool = False,
    full: bool = False,
    jobs: int = 1,
    factor: float = 1.0,
    listen: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Run mutants (default all) against checks; ``only_meant`` tries just the checks that should catch each.

    A mutant for which the tiers hold no check at all is left out.

    Every mutant has a worker process of its own, so ``jobs`` of them run at a time without meeting. ``factor`` multiplies
    the timeout of every check: where a healthy compressor runs out of time, a mutant seems caught by what it is not meant for.
    """
    telling = Lock()

    def one(job: tuple[Mutant, list[Check]]) -> Row:
        row = _run(*job, factor)
        if listen is not None:
            with telling:
                listen(row)
        return row

    work = []
    for mutant in [MUTANTS[name] for name in names] or MUTANTS.values():
        checks = checks_for(mutant, tiers, full=full)
        if only_meant:
            checks = [check for check in checks if check.id in mutant.caught_by]
        if checks:
            work.append((mutant, checks))
    # The longest first: none is left over at the end that runs alone.
    order = sorted(range(len(work)), key=lambda at: -sum(check.cost for check in work[at][1]))
    with ThreadPoolExecutor(jobs) as pool:
        rows = dict(zip(order, pool.map(one, [work[at] for at in order]), strict=True))
    return [rows[at] for at in range(len(work))]


def survivors(rows: Sequence[Row]) -> list[str]:
    """Mutants that no check caught, though some that are meant to ran."""
    return [row.mutant.name for row in rows if row.mutant.caught_by and row.tried and not row.caught]


def toothless(rows: Sequence[Row]) -> list[str]:
    """Checks that ran and caught nothing."""
    ran = {check for row in rows for check in row.ran}
    return sorted(ran - {check for row in rows for check in row.caught})


def _run(mutant: Mutant, checks: Sequence[Check], factor: float) -> Row:
    row, started = Row(mutant), time.perf_counter()
    factor *= CONTAINED_FACTOR if mutant.contained else 1.0
    with Worker(f"mutant:{mutant.name}", mutant.name, {}, Settings(), DEFAULT_MEMORY, factor) as worker:
        for check in checks:
            result = worker.run(check)
            row.ran.append(check.id)
            if result.bad:
                row.caught[check.id] = f"{result.outcome}: {result.message}"
    row.seconds = round(time.perf_counter() - started, 1)
    return row
