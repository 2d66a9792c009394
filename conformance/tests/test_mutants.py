"""The suite tests itself: each fault is found by the checks meant for it, and the healthy ones pass."""

from __future__ import annotations

import os

import pytest

from vericache_conform.case import Case
from vericache_conform.catalogue import all_checks, select
from vericache_conform.checks.contract_determinism import job, kept_between
from vericache_conform.cli.mutants import _line
from vericache_conform.execute import Settings, execute
from vericache_conform.mutants.catalogue import MUTANTS
from vericache_conform.mutants.matrix import Row, run_matrix, survivors, toothless
from vericache_conform.mutants.state import LongestSoFar
from vericache_conform.outcome import Failure
from vericache_conform.processes import in_fresh_process
from vericache_conform.runner import expectations_of
from vericache_conform.subject import resolve

IN_A_PROCESS = {"S-03", "S-05", "S-06", "S-07", "C-07", "C-09"}
"""Checks that start an interpreter: left to the slow test."""
QUICK = [check.id for check in select(["static", "contract"]) if check.id not in IN_A_PROCESS]
SIMPLE = [m.name for m in MUTANTS.values() if not m.contained and m.name not in ("slow-import", "patches-on-import")]


@pytest.mark.parametrize("name", SIMPLE)
def test_a_mutant_is_caught_by_the_checks_meant_for_it_and_by_no_other(name: str) -> None:
    mutant, subject = MUTANTS[name], resolve(f"mutant:{name}")
    settings = Settings(declared={subject.name: expectations_of(subject).declared})
    results = [execute(all_checks()[id_], subject, settings) for id_ in QUICK]
    caught = {result.check: result.message for result in results if result.bad}
    assert set(caught) == mutant.caught_by & set(QUICK), caught
    assert not [result for result in results if result.outcome == "skip" and not result.declared]


def test_what_has_settled_on_a_class_shows_in_a_process_that_compressed_nothing_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the class is set back instead; the slow test starts processes."""
    case = Case(resolve("mutant:longest-so-far"))
    monkeypatch.setattr(LongestSoFar, "longest", 0)
    assert kept_between(case, {}) == [700]
    assert kept_between(case, {}) == []  # settled, and that is why no other check catches it
    assert kept_between(Case(resolve("mutant:healthy-drop")), {}) == []


def test_whatever_ends_a_process_ends_one_check_only() -> None:
    names = [name for name, mutant in MUTANTS.items() if mutant.contained]
    rows = run_matrix(names, only_meant=True, jobs=2)
    assert [row.mutant.name for row in rows] == names
    messages = {row.mutant.name: row.caught["C-05"] for row in rows}
    assert all(row.good for row in rows)
    assert "no answer within 15 s" in messages["hangs"]
    assert "died (signal SIGKILL)" in messages["crashes"]
    assert "memory" in messages["eats-memory"]
    assert "raised SystemExit: 3" in messages["exits"]
    assert "raised ZeroDivisionError" in messages["raises"]


def test_a_busy_machine_gives_every_limit_more_time() -> None:
    """Of the check, and of the process that the check starts: a healthy compressor that runs out of it seems a caught one."""
    (row,) = run_matrix(["hangs"], only_meant=True, factor=1e-4)
    assert "no answer within 0.003 s" in row.caught["C-05"]  # a quarter of what a worker may take to start
    case = Case(resolve("mutant:slow-import"), timeout_factor=1e-4)
    with pytest.raises(Failure, match=r"did not finish look within 0\.012 s; on a busy machine try --timeout-factor"):
        in_fresh_process(case, "look", {"with_transformers": False})


def test_a_catch_that_is_not_meant_says_what_it_saw() -> None:
    row = Row(MUTANTS["healthy-drop"], ["C-07"], {"C-07": "fail: a fresh process did not finish"})
    assert "caught by C-07, which is not meant for it (C-07: fail: a fresh process did not finish)" in _line(row)


def test_every_check_has_a_mutant_that_is_meant_for_it() -> None:
    assert set(all_checks()) - {check for mutant in MUTANTS.values() for check in mutant.caught_by} == set()


def test_a_mutant_is_judged_by_the_checks_that_ran() -> None:
    mutant = MUTANTS["map-off-by-one"]  # for C-02 and C-18
    assert Row(mutant, ["C-02"], {"C-02": "caught"}).good
    assert not Row(mutant, ["C-02"]).good
    assert not Row(mutant, ["C-02", "C-01"], {"C-01": "x", "C-02": "x"}).good
    assert survivors([Row(mutant, ["C-02"])]) == [mutant.name]
    apart = Row(mutant, ["S-01"])
    assert (apart.good, apart.tried, survivors([apart])) == (True, False, [])
    assert toothless([apart, Row(mutant, ["C-02"], {"C-02": "x"})]) == ["S-01"]


def test_patches_of_a_library_that_only_the_plugin_imports_show() -> None:
    (row,) = run_matrix(["patches-on-import"], only_meant=True)
    assert "changes: attention functions of transformers" in row.caught["S-05"]


@pytest.mark.slow
def test_the_whole_matrix() -> None:
    rows = run_matrix(jobs=os.cpu_count() or 1)
    assert all(row.tried for row in rows)
    assert not survivors(rows)
    assert not toothless(rows)
    assert [f"{r.mutant.name}: missed {r.missed}, unrelated {r.unrelated}" for r in rows if not r.good] == []


def test_the_example_of_a_failure_is_the_one_that_failed() -> None:
    """C-07 makes all examples before it judges the first: options that raise must not be blamed on the defaults."""
    case = Case(resolve("mutant:healthy-quant"))
    wrong = {"options": {"bits": 3}, "tokens": 40, "grow": 0, "flavour": "normal", "seed": 0}
    with pytest.raises(Failure) as failed:
        job(case, wrong)
    assert failed.value.example == wrong
