"""The fault table is made from the tests: what is missing, wrong, left open or hangs makes it fail. The page is up to date."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fault_rows import ROWS
from tests.fault_table import BEGIN, END

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "faults.md"
LINE = re.compile(r"\| (?P<row>[^|]+) \| [^|]* \| `(?P<file>[\w/]+\.py)::(?P<test>\w+)` \| (?P<numbers>[\d,| ]+) \|")


def marked() -> set[tuple[str, str]]:
    """File and name of each test with a marker of its own; cases may have some, too, which is not seen here."""
    found = set()
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                marks = [each for each in node.decorator_list if ast.unparse(each).startswith("pytest.mark.fault(")]
                found |= {(str(file.relative_to(ROOT / "tests")), node.name) for _ in marks}
    return found


def test_the_page_names_the_tests_that_there_are() -> None:
    lines = [found for line in PAGE.read_text(encoding="utf-8").splitlines() if (found := LINE.fullmatch(line))]
    named = {(line["file"], line["test"]) for line in lines}
    assert len(named) > 70
    assert marked() <= named, "run `make faults`"
    for file, test in named:
        assert f"\ndef {test}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), (
            f"{file} has no {test}: run `make faults`"
        )


def test_the_page_has_every_row_and_nothing_went_wrong() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for row in ROWS.values():
        found = re.search(
            rf"^\| {re.escape(row.text)} \| ([\d,]+) \| ([\d,]+) \| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE
        )
        assert found, f"no row for {row.text!r}: run `make faults`"
        tests, cases, wrong, hangs, leaks = (int(number.replace(",", "")) for number in found.groups())
        assert (wrong, hangs, leaks) == (0, 0, 0)
        assert 0 < tests <= cases
        assert cases >= row.least


GOOD = """
import pytest

@pytest.mark.fault("refused", "a test")
def test_refused(tally):
    tally.add(3)

@pytest.mark.parametrize("word", ["one", "two"])
@pytest.mark.fault("hang", "another")
def test_hang(word):
    pass

@pytest.mark.fault("hang", "not here")
def test_skipped(tally):
    tally.add(100)
    pytest.skip("no such thing here")
"""
SPOILED = {
    "a row without a test": (GOOD.replace('"refused"', '"hang"'), "row 'refused' (refuses) has 0 cases of 3"),
    "too few cases": (GOOD.replace("add(3)", "add(2)"), "row 'refused' (refuses) has 2 cases of 3"),
    "a row that nobody knows": (GOOD.replace('"hang", "another"', '"hand", "another"'), "no row is called 'hand'"),
    "wrong tokens": (GOOD.replace("add(3)", "add(3, wrong=1)"), "row 'refused' (refuses): 1 wrong"),
    "a failure": (GOOD.replace("    pass\n", "    assert word == 'one'\n"), "test_hang[two] failed"),
    "a file that stays open": (GOOD.replace("    pass\n", "    kept.append(open(__file__))\n") + "kept = []\n", "2 leaks"),
    "a thread that goes on": (
        GOOD.replace("    pass\n", "    threading.Thread(target=time.sleep, args=[3], name=word).start()\n")
        + "import threading, time\n",
        "left thread one",
    ),
    "a process that is left": (
        GOOD.replace("    pass\n", "    kept.append(subprocess.Popen(['sleep', '5']))\n") + "import subprocess\nkept = []\n",
        "left process",
    ),
    "a hang": (
        GOOD.replace("    pass\n", "    word == 'two' and threading.Event().wait()\n") + "import threading\n",
        "row 'hang' (hangs): 1 hangs",
    ),
    "one that is only skipped": (GOOD.replace("    pass\n", "    pytest.skip()\n"), "row 'hang' (hangs) has 0 cases of 1"),
}
SETUP = """
from tests import fault_rows, fault_table
fault_table.ROWS.clear()
fault_table.ROWS["refused"] = fault_rows.Row("Faults", "refuses", 3)
fault_table.ROWS["hang"] = fault_rows.Row("Faults", "hangs")
fault_table.HANG_SECONDS = 1
fault_table.PATIENCE = 0.2
"""


def made(folder: Path, tests: str) -> tuple[int, str, str]:
    """Exit status, what is printed, and the page afterwards."""
    (folder / "conftest.py").write_text(SETUP)
    (folder / "test_it.py").write_text(tests)
    (folder / "page.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.fault_table", "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["--rootdir", str(folder), "--fault-table", "page.md", "test_it.py"]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr, (folder / "page.md").read_text()


def test_a_full_table_is_written(tmp_path: Path) -> None:
    status, said, page = made(tmp_path, GOOD)
    assert status == 0, said
    assert "1 tests were skipped" in said
    assert page.startswith(f"before\n{BEGIN}\n")
    assert page.endswith(f"\n{END}\nafter\n")
    assert "| refuses | 1 | 3 | 0 | 0 | 0 |" in page
    assert "| hangs | another | `test_it.py::test_hang` | 2 | 2 | 0 | 0 | 0 |" in page
    assert "old" not in page
    assert "not here" not in page


@pytest.mark.parametrize("how", SPOILED)
def test_anything_else_fails_and_leaves_the_page_alone(how: str, tmp_path: Path) -> None:
    tests, complaint = SPOILED[how]
    status, said, page = made(tmp_path, tests)
    assert status == 1, said
    assert complaint in said
    assert page == f"before\n{BEGIN}\nold\n{END}\nafter\n"
