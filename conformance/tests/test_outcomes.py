"""Every outcome is one of six, and a pass needs evidence."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from vericache_conform.case import Case, attempt
from vericache_conform.catalogue import find_check
from vericache_conform.check import Check
from vericache_conform.checks.runtime_company import Rounds, same_drafts
from vericache_conform.execute import Settings, execute
from vericache_conform.expected import Expectations, Expected, find_file, read_expectations
from vericache_conform.outcome import Evidence, Failure, Result, Skip
from vericache_conform.subject import Subject, resolve
from vericache_core.errors import ConfigError


def a_check(function: Any, **changes: Any) -> Check:
    made = Check("X-01", "A promise.", "contract", function, "any", frozenset({"token-drop"}), "", "", "", 1.0, 9.0)
    return dataclasses.replace(made, **changes)


@pytest.fixture
def subject() -> Subject:
    return resolve("mutant:healthy-drop")


def raising(error: BaseException) -> Any:
    def function(case: Case) -> Evidence:
        raise error

    return function


@pytest.mark.parametrize(
    ("function", "outcome", "words"),
    [
        (lambda case: Evidence(3), "pass", ""),
        (lambda case: None, "error", "without having tried"),
        (lambda case: Evidence(0), "error", "without having tried"),
        (raising(Failure("broken", example={"tokens": 3})), "fail", "broken"),
        (raising(Skip("not here")), "skip", "not here"),
        (raising(ValueError("in the suite")), "error", "ValueError: in the suite"),
        (raising(MemoryError()), "error", "memory"),
        (lambda case: attempt("compress", lambda: sys.exit(3)), "fail", "compress raised SystemExit: 3"),
        (lambda case: attempt("compress", lambda: 1 / 0), "fail", "compress raised ZeroDivisionError"),
    ],
)
def test_what_a_check_does_becomes_one_outcome(function: Any, outcome: str, words: str, subject: Subject) -> None:
    result = execute(a_check(function), subject, Settings())
    assert result.outcome == outcome
    assert words in result.message
    assert result.reproduce == "vericache-conform run mutant:healthy-drop --check X-01"
    assert Result.from_json(result.to_json()) == result


def test_what_a_compressor_raises_names_its_own_line_and_not_that_of_a_library(subject: Subject) -> None:
    source = "import torch\n\ndef score(rows):\n    return torch.cat([rows, rows[0]])\n"
    mine: dict[str, Any] = {"__name__": "my_package.compressor"}
    exec(compile(source, "my_package/compressor.py", "exec"), mine)  # stands for an author's module
    failed = execute(a_check(lambda case: attempt("compress", lambda: mine["score"](torch.zeros(2, 3)))), subject, Settings())
    assert failed.message.startswith("compress raised RuntimeError: ")
    assert failed.message.endswith(" (my_package.compressor, line 4, in score)")


def test_a_failure_in_a_property_carries_the_smallest_example(subject: Subject) -> None:
    from hypothesis import strategies as st

    def function(case: Case) -> Evidence:
        def body(example: dict[str, int]) -> None:
            if example["tokens"] >= 17:
                raise Failure("too many")

        return Evidence(case.for_all(st.fixed_dictionaries({"tokens": st.integers(0, 1000)}), body, 200))

    failed = execute(a_check(function), subject, Settings())
    assert failed.example == {"tokens": 17}
    again = execute(a_check(function), subject, Settings())
    assert dataclasses.replace(again, seconds=0) == dataclasses.replace(failed, seconds=0)
    assert execute(a_check(function), subject, Settings(), {"tokens": 18}).outcome == "fail"
    assert execute(a_check(function), subject, Settings(), {"tokens": 3}).outcome == "pass"


def test_kinds_and_capabilities_that_do_not_fit_are_declared_skips(subject: Subject) -> None:
    other = execute(a_check(lambda case: Evidence(1), kinds=frozenset({"quantization"})), subject, Settings())
    assert (other.outcome, other.declared) == ("skip", True)
    lacking = execute(a_check(lambda case: Evidence(1), capability="sliding_window"), subject, Settings())
    assert (lacking.outcome, lacking.declared) == ("skip", True)
    unknown = execute(a_check(lambda case: Evidence(1), capability="residual"), subject, Settings())
    assert unknown.outcome == "pass"


# -- expected failures ---------------------------------------------------------------------------------


def expecting(**changes: str) -> Expectations:
    entry = Expected(**{"id": "C-10", "state": "planned", "reason": "later", **changes})
    return Expectations("x", {"C-10": entry})


@pytest.mark.parametrize(
    ("given", "expires", "version", "outcome"),
    [
        ("fail", "", "0.1", "xfail"),
        ("error", "", "0.1", "xfail"),
        ("pass", "", "0.1", "xpass"),
        ("skip", "", "0.1", "skip"),
        ("fail", "0.2", "0.1", "xfail"),
        ("fail", "0.2", "0.2", "fail"),
        ("fail", "0.2", "0.10", "fail"),
        ("pass", "0.2", "0.3", "xpass"),
        ("fail", "0.2", "", "xfail"),
    ],
)
def test_expectations_are_strict_both_ways(given: Any, expires: str, version: str, outcome: str) -> None:
    result = Result("C-10", "mine", given, "because")
    assert expecting(expires=expires).apply(result, version).outcome == outcome
    other = Result("C-11", "mine", given, "because")
    assert expecting().apply(other, version) is other


MALFORMED = {
    "[[expected]\n": (1, "not valid TOML"),
    "\n[[expected]]\nid = 'C-10'\nstate = 'planned'\n": (2, "reason is missing"),
    "[[expected]]\nid = 'C-77'\nstate = 'planned'\nreason = 'x'\n": (1, "no check 'C-77'"),
    "[[expected]]\nid = 'C-10'\nstate = 'maybe'\nreason = 'x'\n": (1, "state is 'maybe'"),
    "[[expected]]\nid = 'C-10'\nstate = 'planned'\nreason = ' '\n": (1, "reason must be text"),
    "[[expected]]\nid = 'C-10'\nstate = 'planned'\nreason = 'x'\nuntil = '1'\n": (1, "unknown key 'until'"),
    "[[expected]]\nid = 'C-10'\nstate = 'planned'\nreason = 'x'\nexpires = 'soon'\n": (1, "not a version"),
    "[[expected]]\nid='C-10'\nstate='planned'\nreason='x'\n[[expected]]\nid='C-10'\nstate='planned'\nreason='x'\n": (
        5,
        "twice",
    ),
    "x = 1\n[declared]\n": (1, "unknown key 'x'"),
    "[declared]\nmin_acceptance = 'high'\n": (2, "must be a number"),
    "[declared]\nspeed = 3\n": (2, "unknown declaration"),
    "expected = 3\n": (1, "list of tables"),
}


@pytest.mark.parametrize("text", MALFORMED, ids=lambda text: MALFORMED[text][1])
def test_a_malformed_file_is_refused_with_line_and_reason(text: str, tmp_path: Path) -> None:
    from vericache_conform.catalogue import all_checks

    line, words = MALFORMED[text]
    path = tmp_path / "conformance.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        read_expectations(path, all_checks())
    assert f"{path}:{line}: " in str(caught.value)
    failing = resolve("mutant:healthy-drop")
    failing.expected_file = path
    result = execute(all_checks()["S-08"], failing, Settings())
    assert result.outcome == "fail"
    assert words in result.message


def test_a_good_file_is_read_and_found_beside_its_project(tmp_path: Path) -> None:
    from vericache_conform.catalogue import all_checks

    project = tmp_path / "project"
    module = project / "src" / "package" / "plugin.py"
    module.parent.mkdir(parents=True)
    module.touch()
    assert find_file(str(module)) is None
    (project / "pyproject.toml").touch()
    (tmp_path / "conformance.toml").touch()
    assert find_file(str(module)) is None  # not the project's own
    (project / "conformance.toml").write_text(
        "[[expected]]\nid = 'C-10'\nstate = 'planned'\nreason = 'later'\nexpires = '9'\n[declared]\nmin_acceptance = 0.5\n"
    )
    assert find_file(str(module)) == project / "conformance.toml"
    read = read_expectations(project / "conformance.toml", all_checks())
    assert read.expected["C-10"].reason == "later"
    assert read.declared == {"min_acceptance": 0.5}


def test_a_subject_that_lives_in_this_process_only_is_an_undeclared_skip() -> None:
    from vericache_conform.api import check_compressor
    from vericache_conform.mutants.healthy import Drop, spec

    class Local(Drop):
        name = "local"

    report = check_compressor(spec(Local), checks=["C-07", "C-17"])
    assert [result.outcome for result in report.results] == ["skip", "pass"]
    assert not report.results[0].declared
    assert report.passed
    assert report.level("local") == "passed"


def test_a_model_that_cannot_be_loaded_is_no_fault_of_the_compressor(subject: Subject, tmp_path: Path) -> None:
    found = execute(find_check("M-01"), subject, Settings(model=str(tmp_path / "nowhere")))
    assert (found.outcome, found.example) == ("error", None)
    assert "nowhere' does not exist" in found.message
    assert len(found.message.splitlines()) == 1


def test_drafts_are_compared_where_they_start_at_the_same_place() -> None:
    prompt: tuple[int, ...] = (1, 2)
    other: tuple[int, ...] = (3,)
    alone: Rounds = {(prompt, 1): [5, 6, 7], (prompt, 4): [8]}
    same_drafts("it", prompt, alone, {(prompt, 1): [5, 6], (prompt, 3): [9], (other, 4): [1]})  # fewer rows, another start
    same_drafts("it", other, alone, {})  # nothing was drafted
    with pytest.raises(Failure, match="it drafts other tokens in company after 4"):
        same_drafts("it", prompt, alone, {**alone, (prompt, 4): [9]})
    with pytest.raises(Failure, match="never from the same place"):
        same_drafts("it", prompt, alone, {(prompt, 2): [5], (other, 1): [5]})
