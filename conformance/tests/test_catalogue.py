"""The list of checks keeps its own promises."""

from __future__ import annotations

import pytest

from vericache_conform.catalogue import all_checks, find_check, select
from vericache_conform.check import ANY, EVERY_KIND, TIERS, check
from vericache_conform.mutants.catalogue import MUTANTS, find_mutant
from vericache_conform.outcome import Evidence
from vericache_core.errors import UsageError
from vericache_core.plugins.spec import CAPABILITIES

CHECKS = all_checks()
PROMISED = [
    *[f"S-{n:02}" for n in range(1, 9)],
    *[f"C-{n:02}" for n in range(1, 28)],
    *[f"R-{n:02}" for n in range(1, 16)],
    "M-01",
    "P-01",
]


def test_every_promised_check_exists_and_no_other() -> None:
    assert sorted(CHECKS) == sorted(PROMISED)


@pytest.mark.parametrize("id_", PROMISED)
def test_a_check_says_what_it_is_for(id_: str) -> None:
    found = CHECKS[id_]
    assert found.tier in TIERS
    assert found.capability == ANY or found.capability in CAPABILITIES
    assert found.kinds
    assert found.kinds <= EVERY_KIND
    assert found.title.endswith(".")
    assert len(found.title) < 130
    for text in (found.rationale, found.origin, found.fix):
        assert len(text) > 20
    assert 0 < found.cost < found.timeout


def test_every_check_is_killed_by_a_mutant_and_every_mutant_by_a_check() -> None:
    killed = set().union(*(mutant.caught_by for mutant in MUTANTS.values()))
    assert killed == set(CHECKS)
    broken = [mutant for mutant in MUTANTS.values() if mutant.caught_by]
    assert len(broken) >= 25
    assert {name for name, mutant in MUTANTS.items() if not mutant.caught_by} == {"healthy-drop", "healthy-quant"}
    assert all(mutant.fault for mutant in MUTANTS.values())


def test_an_id_cannot_be_used_twice() -> None:
    with pytest.raises(ValueError, match="defined twice"):

        @check("C-01", tier="contract", rationale="", origin="", fix="")
        def again(case: object) -> Evidence:
            """Title."""
            return Evidence(1)


def test_ids_are_found_in_any_case_and_unknown_ones_are_refused() -> None:
    assert find_check("c-09").id == "C-09"
    with pytest.raises(UsageError, match="no check 'C-99'; did you mean"):
        find_check("C-99")
    with pytest.raises(UsageError, match="no mutant 'drop-window'; did you mean 'drops-window'"):
        find_mutant("drop-window")


def test_a_budget_takes_the_cheapest_checks_that_fit() -> None:
    everything = select()
    assert {found.tier for found in everything} == {"static", "contract", "runtime"}
    few = select(budget=10.0)
    assert 0 < len(few) < len(everything)
    assert sum(found.cost for found in few) <= 10.0
    assert {found.tier for found in select(["perf"])} == {"perf"}
    assert [found.id for found in select(ids=["R-01", "c-01"])] == ["R-01", "C-01"]
    assert select(budget=0.01) == []
