"""The door for pytest, and the other two with the same ids."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from vericache_conform import CompressorConformance, check_compressor, parametrize_with_checks
from vericache_conform.mutants.healthy import DROP
from vericache_conform.pytest_door import BoundCheck, bound_checks

SOME = ["C-01", "C-12", "C-17"]


@parametrize_with_checks(DROP, checks=SOME)
def test_as_a_function(check: BoundCheck) -> None:
    check()


class TestAsAClass(CompressorConformance):
    compressor = "mutant:healthy-quant"
    tiers = ("static",)
    options: ClassVar[dict[str, int]] = {"bits": 2}

    def test_the_checks_are_bound(self) -> None:
        assert "test_check" in vars(type(self))


def test_the_doors_have_the_same_ids() -> None:
    api = check_compressor(DROP, checks=SOME)
    assert [result.check for result in api.results] == [bound.check.id for bound in bound_checks(DROP, checks=SOME)] == SOME


def test_a_failure_fails_with_example_and_fix() -> None:
    (bound,) = bound_checks("mutant:float-budget", checks=["C-04"])
    with pytest.raises(pytest.fail.Exception, match=r"(?s)C-04 fail.*example: .*fix: "):
        bound()


def test_the_check_cannot_be_overridden() -> None:
    with pytest.raises(TypeError, match=r"conformance\.toml"):

        class Quiet(CompressorConformance):
            def test_check(self) -> None:
                """Nothing."""


def test_the_plugin_module_imports_no_torch() -> None:
    code = "import sys, vericache_conform.pytest_plugin; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_in_a_project_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "from vericache_conform import parametrize_with_checks\n"
        "@parametrize_with_checks('mutant:drops-window', checks=['C-03', 'C-12', 'C-17'])\n"
        "def test_conformance(check):\n    check()\n"
        "def test_case(vericache_case):\n"
        "    case = vericache_case('identity')\n    assert case.length > 60\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--strict-markers", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert "1 failed, 2 passed, 1 skipped" in done.stdout
    assert "test_conformance[C-03]" in done.stdout
