from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vericache_core.cli import main as cli
from vericache_core.runtime.calibration import Calibration, Fingerprint
from vericache_core.runtime.costs import CostModel, Link
from vericache_core.simulate.hardware import DEVICES

ROOT = Path(__file__).parents[2]
SMALL = [
    "simulate",
    "-m",
    "smollm2-135m",
    "--device",
    "cpu-2",
    "--requests",
    "3",
    "--prompt-tokens",
    "500-600",
    "--new-tokens",
    "20",
]


def answer(argv: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    assert cli.main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_torch_is_not_imported() -> None:
    code = (
        f"import sys; from vericache_core.cli.main import main; code = main({SMALL!r})\n"
        "heavy = [m for m in ('torch', 'transformers', 'numpy', 'pluggy') if m in sys.modules]\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_row_for_plain_and_one_for_vericache_on_each_device(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer([*SMALL, "--device", "h200", "--window", "4", "--mode", "pinned"], capsys)
    assert found["schema"] == "vericache.simulate/1"
    assert [(row["device"], row["system"]) for row in found["rows"]] == [
        ("cpu-2", "plain"),
        ("cpu-2", "staggered pinned"),
        ("h200", "plain"),
        ("h200", "staggered pinned"),
    ]
    for plain, ours in zip(found["rows"][::2], found["rows"][1::2], strict=True):
        assert plain["speedup_vs_plain"] == 1
        assert ours["speedup_vs_plain"] == pytest.approx(ours["tokens_per_s"] / plain["tokens_per_s"])
        assert plain["tokens"] == ours["tokens"] == 60
        assert 0 < ours["peak_device_kv_bytes"] <= ours["device_kv_budget_bytes"]
        assert ours["latency_s"]["p50"] <= ours["latency_s"]["p99"]
        assert ours["mean_window"] == pytest.approx(4, abs=1)
    assert cli.main(SMALL) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("DEVICE")
    assert len(lines) == 3


def test_swaps_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    rows = answer([*SMALL, "--mode", "offloaded", "--window", "4", "--scheduler", "lockstep", "--tier", "disk"], capsys)["rows"]
    assert rows[1]["system"] == "lockstep offloaded"
    assert rows[1]["swap_bytes"] > 0
    assert 0 <= rows[1]["swap_hidden_fraction"] < 1
    everything = answer(
        [*SMALL, "--mode", "offloaded", "--window", "4", "--scheduler", "lockstep", "--tier", "disk", "--swap", "all"], capsys
    )
    assert everything["rows"][1]["swap_bytes"] > rows[1]["swap_bytes"]


def test_traces_and_calibrations_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, costs = tmp_path / "trace.jsonl", tmp_path / "costs.json"
    trace.write_text('{"at": 0, "prompt_tokens": 50, "new_tokens": 3}\n{"at": 9, "prompt_tokens": 50, "new_tokens": 4}\n')
    model = CostModel({8: 1.0}, 0.0, 0.0, {"host": Link(0.0, 1e-9)}, 30)
    Calibration(Fingerprint("cpu", 2, "2.13", "demo", "x", "bfloat16"), model).save(costs)
    rows = answer([*SMALL[:5], "--trace", str(trace), "--calibration", str(costs)], capsys)["rows"]
    assert rows[0]["tokens"] == 7
    assert rows[0]["seconds"] == pytest.approx(9 + 4 * (1 + DEVICES["cpu-2"].between))


def test_a_proposer_adds_a_row_and_its_proposals(capsys: pytest.CaptureFixture[str]) -> None:
    command = [*SMALL, "--proposer", "ngram", "--proposal-share", "1,0"]
    for more, system in ((["--mode", "plain"], "staggered plain ngram"), (["--mode", "pinned"], "staggered pinned ngram")):
        plain, ours = answer([*command, "--proposal-hazard", "0", *more], capsys)["rows"]
        assert (plain["system"], plain["proposed"], ours["system"]) == ("plain", 0, system)
        assert ours["proposals_kept"] == ours["proposed"] > 0
        assert ours["speedup_vs_plain"] > 1
    worse = answer([*command, "--mode", "plain"], capsys)["rows"][1]
    assert 0 < worse["proposals_kept"] < worse["proposed"]


def test_the_list_names_sources(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(["simulate", "--list"], capsys)
    assert {device["name"] for device in found["devices"]} == {"h100-nvl", "rtx-pro-6000", "gh200", "h200", "cpu-2"}
    assert all(len(device["source"]) > 20 for device in found["devices"])
    per_token = {model["name"]: model["kv_bytes_per_token"] for model in found["models"]}
    assert per_token == {"mistral-24b": 163_840, "qwen-32b": 262_144, "llama-70b": 327_680, "smollm2-135m": 23_040}
    assert cli.main(["simulate", "--list"]) == 0
    assert "llama-70b" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--device", "gh-200"], "unknown device 'gh-200'; did you mean 'gh200'?"),
        (["-m", "qwen"], "unknown model 'qwen'"),
        (["-m", "llama-70b"], "llama-70b does not fit on 1 x rtx-pro-6000"),
        (["--count", "0"], "--count: expected 1 or more"),
        (["--ring", "-1"], "--ring: expected 0 or more"),
        (["--keep", "0"], "--keep: expected more than 0"),
        (["--keep", "nan"], "--keep: expected more than 0"),
        (["--hazard", "1.5"], "--hazard: expected numbers from 0 to 1"),
        (["--hazard", "a"], "--hazard: expected numbers from 0 to 1"),
        (["--window", "65"], "window: expected 0 to 64"),
        (["--window", "few"], "--window: expected a number or auto"),
        (["--window", "4", "--mode", "plain"], "--window and --mode plain are both given"),
        (["--requests", "0"], "impossible arrivals"),
        (["--requests", "100000"], "--requests: expected at most 10000"),
        (["--rate", "-1"], "impossible arrivals"),
        (["--prompt-tokens", "9-5"], "impossible arrivals"),
        (["--prompt-tokens", "x"], "--prompt-tokens: expected N or N-M"),
        (["--kv-memory", "-1"], "--kv-memory: expected more than 0"),
        (["--kv-memory", "0.1"], "too small for one request"),
        (["--host-memory", "0.1", "--mode", "offloaded"], "host budget is too small"),
        (["--trace", "none.jsonl", "--rate", "0"], "--trace and --rate exclude each other"),
        (["--trace", "none.jsonl", "--prompt-tokens", "9"], "--trace and --prompt-tokens exclude each other"),
        (["--trace", "none.jsonl"], "trace 'none.jsonl' cannot be read"),
        (["--proposal-share", "0.4"], "--proposal-share has no effect"),
        (["--proposal-hazard", "0"], "--proposal-hazard has no effect"),
        (["--proposer", "ngram", "--proposal-share", "0.5,2"], "--proposal-share: expected numbers from 0 to 1"),
        (["--proposer", "ngram", "--proposal-hazard", "few"], "--proposal-hazard: expected numbers from 0 to 1"),
        (["--proposer", "ngram", "--drafters", "2"], "--proposer has no effect"),
        (["--calibration", "none.json"], "calibration file 'none.json' does not exist"),
    ],
)
def test_bad_options_are_one_clear_error(argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert reason in captured.err
    assert "internal" not in captured.err
