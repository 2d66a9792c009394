"""Every check there is, in the order of a report."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Final

from vericache_conform.check import TIERS, Check, Tier, registered
from vericache_core.errors import UsageError
from vericache_core.plugins.fields import did_you_mean

MODULES: Final = (
    "static",
    "contract_map",
    "contract_budget",
    "contract_shapes",
    "contract_inputs",
    "contract_state",
    "contract_determinism",
    "contract_stream",
    "contract_bytes",
    "contract_values",
    "contract_attention",
    "runtime_identity",
    "runtime_drafts",
    "runtime_company",
    "model",
    "perf",
)


def all_checks() -> dict[str, Check]:
    """Checks by id: by tier, then in the order in which they are written."""
    for module in MODULES:
        importlib.import_module(f"vericache_conform.checks.{module}")
    found = registered()
    return dict(sorted(found.items(), key=lambda entry: (TIERS.index(entry[1].tier), entry[0])))


def find_check(id: str) -> Check:
    """The check with this id, in any case.

    Raises:
        UsageError: there is none; the nearest one is named.
    """
    checks = all_checks()
    if id.upper() in checks:
        return checks[id.upper()]
    near = did_you_mean(id.upper(), checks) or next((c for c in checks if c.startswith(id.upper()[:1])), None)
    raise UsageError(f"there is no check {id!r}" + (f"; did you mean {near!r}?" if near else ""), hint="vericache-conform list")


def select(tiers: Sequence[Tier] = (), ids: Iterable[str] = (), budget: float | None = None) -> list[Check]:
    """Checks of these tiers (default: static, contract and runtime), or exactly these ids, within a budget.

    With a budget of seconds per compressor the cheapest checks are taken first, tier by tier, as long as their
    recorded cost fits.
    """
    wanted = [find_check(one) for one in ids]
    if not wanted:
        chosen = tiers or ("static", "contract", "runtime")
        wanted = [check for check in all_checks().values() if check.tier in chosen]
    if budget is None:
        return wanted
    kept: set[str] = set()
    left = budget
    for check in sorted(wanted, key=lambda check: (TIERS.index(check.tier), check.cost)):
        if check.cost <= left:
            left -= check.cost
            kept.add(check.id)
    return [check for check in wanted if check.id in kept]
