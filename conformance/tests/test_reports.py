"""Reports: complete or refused, the same for the same seed, and readable in every form."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from vericache_conform.api import check_compressor
from vericache_conform.outcome import Result
from vericache_conform.report.compare import changes, leaderboard, measured
from vericache_conform.report.html import html_page
from vericache_conform.report.junit import junit_xml
from vericache_conform.report.markdown import markdown
from vericache_conform.report.model import Report, read_report, without_times
from vericache_conform.report.schema import SCHEMAS
from vericache_conform.report.terminal import print_report
from vericache_conform.runner import exit_status
from vericache_core.errors import UsageError

CHECKS = ["C-01", "C-04", "C-12", "C-17"]
SPEED = {
    "acceptance": 0.5,
    "bytes_share": 0.25,
    "points": [{"options": {}, "bytes_share": 0.25, "acceptance": 0.5}],
    "acceptance_by_position": [0.6, 0.4],
    "margin_histogram": {"labels": ["<0.1", ">=0.1"], "counts": [3, 1]},
    "drafted_per_round": [4, 4, 2],
    "accepted_per_round": [4, 1, 0],
}


def report_of(name: str) -> Report:
    return check_compressor(f"mutant:{name}", checks=CHECKS)


@pytest.fixture(scope="module")
def good() -> Report:
    return report_of("healthy-drop")


@pytest.fixture(scope="module")
def bad() -> Report:
    made = report_of("float-budget")
    made.results.append(Result("R-08", "float-budget", "pass", facts=SPEED, tried=1))
    made.results.append(Result("C-02", "float-budget", "error", "bad \x00 <&> text", output="noise", reproduce="again"))
    made.finish(1, 1.0)
    return made


def saved(report: Report, path: Path) -> Path:
    path.write_text("\n".join(report.lines()) + "\n")
    return path


def test_a_report_survives_being_written(good: Report, tmp_path: Path) -> None:
    read = read_report(saved(good, tmp_path / "r.jsonl"))
    assert list(read.lines()) == list(good.lines())
    assert read.passed
    assert read.level("healthy-drop") == "passed"
    assert "S-01 did not run" in read.short_of_certified("healthy-drop")
    assert read.summary() == "3 passed, 0 failed, 1 skipped"


def test_checks_that_fail_at_the_same_line_of_a_compressor_are_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of("healthy-drop")
    report.results.clear()
    for id_, where in (("C-01", "in score"), ("C-02", "in score"), ("C-04", "in extend"), ("C-05", None)):
        facts = {} if where is None else {"raised": f"ValueError (mine, line 7, {where})"}
        report.results.append(Result(id_, "healthy-drop", "fail", f"{id_} raised", facts=facts, reproduce="again"))
    print_report(report)
    out = capsys.readouterr().out
    assert "\nFAIL C-02 healthy-drop: ValueError (mine, line 7, in score), as C-01\n" in out
    assert out.count("reproduce: again") == 3
    assert "4 failed" in out.splitlines()[-1]


def test_the_same_seed_gives_the_same_bytes_but_for_times(good: Report) -> None:
    def timeless(report: Report) -> list[str]:
        return [json.dumps(without_times(json.loads(line)), sort_keys=True) for line in report.lines()]

    assert timeless(report_of("healthy-drop")) == timeless(good)
    assert timeless(report_of("float-budget")) == timeless(report_of("float-budget"))
    assert without_times({"a": {"seconds": 1, "compress_seconds": 2, "b": [{"started": 3, "c": 4}]}}) == {
        "a": {"b": [{"c": 4}]}
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda lines: lines[:-1], "not complete"),
        (lambda lines: [*lines[:2], lines[-1]], "not complete"),
        (lambda lines: [lines[0].replace("report/1", "report/9"), *lines[1:]], "has schema"),
        (lambda lines: lines[1:], "no header"),
        (lambda lines: [*lines[:-1], lines[-1][:-9]], "not a line"),
        (lambda lines: ["[]"], "not a line"),
        (lambda lines: [], "no header"),
    ],
)
def test_a_report_that_is_not_whole_is_refused(change: object, words: str, good: Report, tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(change(list(good.lines()))))  # type: ignore[operator]
    with pytest.raises(UsageError, match=words):
        read_report(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_report(tmp_path / "nowhere")


def test_exit_codes_and_levels(good: Report, bad: Report) -> None:
    assert exit_status(good) == 0
    assert exit_status(good, "certified") == 1
    assert exit_status(bad) == 1
    assert exit_status(Report({"subjects": []})) == 5
    whole = Report({"subjects": [{"name": "x"}], "required": ["C-01", "C-02"]})
    whole.results = [Result("C-01", "x", "pass"), Result("C-02", "x", "skip", "n/a", declared=True)]
    assert whole.level("x") == "certified"
    for outcome, level in (("xfail", "passed"), ("xpass", "failed"), ("error", "failed")):
        whole.results[0] = Result("C-01", "x", outcome)  # type: ignore[arg-type]
        assert whole.level("x") == level
    whole.results = [Result("C-01", "x", "pass"), Result("C-02", "x", "skip", "no reason of the descriptor")]
    assert whole.level("x") == "passed"


def test_junit(bad: Report) -> None:
    root = ET.fromstring(junit_xml(bad))
    (suite,) = root
    assert suite.attrib["tests"] == str(len(bad.results))
    assert (suite.attrib["failures"], suite.attrib["errors"], suite.attrib["skipped"]) == ("1", "1", "1")
    assert suite.find("testcase/failure") is not None
    assert suite.find("testcase[@name='C-02']/error") is not None


def test_html_is_one_file_that_loads_nothing_and_shows_the_plots(bad: Report) -> None:
    page = html_page(bad)
    assert page.count("<svg") == 4
    for forbidden in ("<script", "http://", "https://", "src=", "@import", "url("):
        assert forbidden not in page.replace("http://www.w3.org/2000/svg", "")
    assert "bad \x00 &lt;&amp;&gt; text".replace("\x00", "") in page.replace("\x00", "")
    ET.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])


def test_markdown_and_leaderboard(good: Report, bad: Report) -> None:
    text = markdown(bad)
    assert "| float-budget | failed | 0.5 | 0.25 |" in text
    assert "| C-04 | fail |" in text
    board = leaderboard([bad, good])
    assert [row["compressor"] for row in board] == ["healthy-drop", "float-budget"]


def test_what_a_real_model_accepts_comes_before_what_random_weights_do() -> None:
    facts = {"R-08": 0.01, "M-01": 0.8, "P-01": 0.02}
    results = [Result(check, "it", "pass", facts={"acceptance": share}) for check, share in facts.items()]
    results.append(Result("P-01", "it", "pass", facts={"compress_seconds": 0.5}))
    assert measured(results) == {"acceptance": 0.8, "compress_seconds": 0.5, "compress_ms": 500.0}


def test_changes_between_two_runs(good: Report) -> None:
    other = report_of("healthy-drop")
    assert changes(good, other) == []
    other.results[0] = Result("C-01", "healthy-drop", "fail", "broken since")
    (change,) = changes(good, other)
    assert (change["before"], change["after"], change["worse"]) == ("pass", "fail", True)
    assert not changes(other, good)[0]["worse"]


def test_lines_have_what_the_schema_requires(bad: Report) -> None:
    kinds = {entry["properties"]["kind"]["const"]: entry for entry in SCHEMAS["report"]["oneOf"]}
    for line in map(json.loads, bad.lines()):
        assert not [key for key in kinds[line["kind"]]["required"] if key not in line]
