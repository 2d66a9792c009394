"""The page that says which test shows which fault names tests that are there, as many as it says."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"
ROW = re.compile(r"\| (?P<fault>.+?) \| `(?P<file>[\w/]+\.py)::(?P<test>\w+)` \| (?P<tests>\d+) \| (?P<cases>.*?) ?\|")


def rows() -> list[re.Match[str]]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|") and "---" not in line]
    found = [ROW.fullmatch(line) for line in lines if "| test | tests |" not in line]
    assert all(found), "a row that is none"
    return [row for row in found if row is not None]


def test_every_test_is_there_once() -> None:
    named = [(row["file"], row["test"]) for row in rows()]
    assert len(set(named)) == len(named) > 70
    for file, test in named:
        assert f"\ndef {test}(" in (ROOT / "tests" / file).read_text(), f"{file} has no {test}"


def test_those_said_to_be_slow_are() -> None:
    for row in rows():
        text = (ROOT / "tests" / row["file"]).read_text()
        before = text[: text.index(f"\ndef {row['test']}(")].rsplit("\n\n\n", 1)[-1]
        assert ("mark.slow" in before) == ("*" in row["fault"]), row["test"]


@pytest.mark.slow
def test_there_are_as_many_as_the_page_says() -> None:
    files = sorted({f"tests/{row['file']}" for row in rows()})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    counts = Counter(line.split("[", 1)[0] for line in done.stdout.splitlines() if "::" in line)
    wrong = {row["test"]: counts[f"tests/{row['file']}::{row['test']}"] for row in rows()}
    assert {row["test"]: int(row["tests"]) for row in rows()} == wrong
