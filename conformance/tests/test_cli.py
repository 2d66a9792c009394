"""The command: data on stdout, pytest's exit codes, a last line that sums up, and whatever happens the run completes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vericache_conform import isolation
from vericache_conform.cli.main import COMMANDS, main
from vericache_conform.report.model import read_report
from vericache_core.errors import PluginLoadError, UsageError
from vericache_core.plugins.testing import on_path, write_distribution


def test_run_shows_a_failure_writes_every_report_and_replays_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, page, xml = (tmp_path / name for name in ("r.jsonl", "r.html", "r.xml"))
    arguments = ["run", "mutant:float-budget", "no-such-compressor", "--check", "S-01", "--check", "C-04", "--seed", "3"]
    arguments += ["--report", str(report), "--html", str(page), "--junitxml", str(xml)]
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "FAIL  C-04 float-budget" in out
    assert "reproduce: vericache-conform run mutant:float-budget --check C-04 --seed 3" in out
    assert "FAIL  S-01 no-such-compressor" in out
    assert out.splitlines()[-1] == "1 passed, 2 failed, 1 skipped"
    assert page.read_text().startswith("<!doctype html>")
    assert xml.read_text().startswith("<?xml")
    assert read_report(report).footer["exit_status"] == 1

    assert main(["report", str(report)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 passed, 2 failed, 1 skipped"
    assert main(["replay", str(report), "--check", "C-04", "--json"]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["kind"] for line in lines] == ["header", "result", "footer"]
    first = next(result for result in read_report(report).results if result.check == "C-04")
    assert lines[1]["example"] == first.example
    assert lines[1]["message"] == first.message
    assert main(["compare", str(report), str(report), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changes"] == []


def test_what_a_compressor_prints_is_kept_from_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "mutant:prints", "--check", "C-17", "--json"]) == 0
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert "compressing layer 0" in lines[1]["output"]
    assert lines[-1]["kind"] == "footer"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["runn"], "did you mean 'run'"),
        (["run"], "NAME"),
        (["run", "identity", "--check", "C-99"], "no check 'C-99'"),
        (["run", "identity", "--budget", "soon"], "is no time"),
        (["run", "identity", "--budget", "0s"], "no check fits"),
        (["run", "identity", "--memory", "much"], "is no size"),
        (["run", "identity", "--timeout-factor", "0"], "must be positive and finite"),
        (["mutants", "hangs", "--timeout-factor", "inf"], "must be positive and finite"),
        (["run", "identity", "-o", "keep"], "key=value"),
        (["run", "identity", "--expected", "nowhere.toml"], "is no file"),
        (["explain", "Q-01"], "no check 'Q-01'"),
        (["report", "nowhere.jsonl"], "cannot be read"),
        (["mutants", "nothing-like-it"], "no mutant"),
        (["passport", "show", "nothing"], "no installed compressor"),
    ],
)
def test_usage_errors_are_one_line_and_exit_4(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert len(captured.err.splitlines()) <= 2


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 2, "vericache-conform: interrupted"),
        (ZeroDivisionError("x"), 3, "this is a bug of the suite"),
        (PluginLoadError("does not load"), 1, "error: does not load"),
        (UsageError("no such thing"), 4, "error: no such thing"),
        (BrokenPipeError(), 1, ""),
    ],
)
def test_exit_codes_are_those_of_pytest(
    error: BaseException, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(args: object) -> int:
        raise error

    monkeypatch.delenv("VERICACHE_DEBUG", raising=False)
    monkeypatch.setattr("vericache_conform.cli.list.run", broken)
    monkeypatch.setattr(os, "dup2", lambda *_: None)  # a closed pipe would cost pytest its own stdout
    assert main(["list"]) == code
    assert words in capfd.readouterr().err


def test_a_killed_run_leaves_no_report_that_looks_complete(tmp_path: Path) -> None:
    report, stream = tmp_path / "r.jsonl", tmp_path / "stdout.jsonl"
    command = [sys.executable, "-m", "vericache_conform.cli.main", "run", "mutant:hangs", "--check", "S-01", "--check", "C-05"]
    with stream.open("w") as sink:
        process = subprocess.Popen([*command, "--json", "--report", str(report)], stdout=sink, start_new_session=True)
        while stream.read_text().count("\n") < 2 and process.poll() is None:  # the header and the first result
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not report.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["stdout.jsonl"]
    with pytest.raises(UsageError, match="not complete"):
        read_report(stream)


BROKEN = {
    "raising": "raise RuntimeError('no\\nway')",
    "exiting": "import os; os._exit(7)",
    "printing": "print('hello')",  # and describes nothing
}


def test_a_plugin_that_does_not_load_fails_and_the_rest_of_the_run_completes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, source in BROKEN.items():
        module = f"vericache_compressor_{name}"
        write_distribution(tmp_path, f"vericache-compressor-{name}", {name: module}, {f"{module}/__init__": source})
    with on_path(tmp_path):
        code = main(["run", *BROKEN, "identity", "--check", "C-17", "--json"])
    assert code == 1
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines()]  # nothing else was printed
    assert [entry["loaded"] for entry in lines[0]["subjects"]] == [False, False, False, True]
    found = {(line["subject"], line["check"]): line for line in lines[1:-1]}
    for name, words in (("raising", "no way"), ("exiting", "exit status 7"), ("printing", "")):
        assert found[name, "S-01"]["outcome"] == "fail"
        assert words in found[name, "S-01"]["message"]
        assert found[name, "C-17"]["outcome"] == "skip"
    assert found["identity", "C-17"]["outcome"] == "pass"
    assert lines[-1]["summary"] == "1 passed, 3 failed, 3 skipped"


def test_a_plugin_that_hangs_while_it_loads_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Alone: time enough for others to load on a busy machine would be too long to wait for this one."""
    module = "vericache_compressor_hanging"
    source = "import time; time.sleep(1000)"
    write_distribution(tmp_path, "vericache-compressor-hanging", {"hanging": module}, {f"{module}/__init__": source})
    monkeypatch.setattr(isolation, "START_ALLOWANCE", 8.0)
    with on_path(tmp_path):
        assert main(["run", "hanging", "--check", "C-17", "--json"]) == 1
    load, check = (json.loads(line) for line in capfd.readouterr().out.splitlines()[1:-1])
    assert (load["check"], load["outcome"], check["outcome"]) == ("S-01", "fail", "skip")
    assert "within 8 s" in load["message"]


def test_list_explain_and_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--tier", "static", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["checks"]
    assert [check["id"] for check in listed] == [f"S-{n:02}" for n in range(1, 9)]
    assert main(["explain", "C-09"]) == 0
    out = capsys.readouterr().out
    for word in ("why:", "origin:", "fix:", "forgets-option"):
        assert word in out
    for name in ("report", "passport"):
        assert main(["schema", name]) == 0
        assert json.loads(capsys.readouterr().out)["title"]
    assert main(["mutants", "--list"]) == 0
    assert "drops-window" in capsys.readouterr().out


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in COMMANDS)
    assert main([]) == 0


def test_a_malformed_expectations_file_fails_one_check_and_the_rest_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "conformance.toml"
    path.write_text("[[expected]]\nid = 'C-17'\n")
    assert main(["run", "mutant:healthy-drop", "--check", "S-08", "--check", "C-17", "--expected", str(path)]) == 1
    out = capsys.readouterr().out
    assert f"{path}:1: state is missing" in out
    assert out.splitlines()[-1] == "1 passed, 1 failed, 0 skipped"
