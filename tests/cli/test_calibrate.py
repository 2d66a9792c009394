"""``vericache calibrate``: a file that an engine of the same model accepts, with priors it finds again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_generate import folder  # noqa: F401 (a fixture)
from vericache_core import Engine, EngineConfig
from vericache_core.cli.main import main
from vericache_core.runtime.calibration import load_calibration, prior_key


def test_costs_and_acceptance_are_measured_and_used(
    folder: str,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "calibration.json"
    arguments = ["--rows", "16", "--acceptance", "random:keep=0.5", "--context", "300", "--new-tokens", "12", "--json"]
    assert main(["calibrate", str(file), "-m", folder, *arguments]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert set(shown["costs"]["links"]) == {"host", "disk"}
    assert "16" in shown["costs"]["shapes"]
    config = EngineConfig(compressor="random", keep=0.5, window="auto", mode="auto", rows=16, calibration=str(file))
    with Engine.from_pretrained(folder, config) as engine:
        key = prior_key("random", config.compressor_options())
        assert key in shown["priors"]
        assert engine.planner._experience(key).regimes.mean == pytest.approx(shown["priors"][key]["hazard"], rel=0.05)


def test_the_limit_of_the_link_is_in_what_swaps_cost(
    folder: str,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, store = tmp_path / "calibration.json", tmp_path / "store"
    arguments = ["--rows", "16", "--link-bytes-per-s", "1000", "--prefix-store", f"file://{store}", "--json"]
    assert main(["calibrate", str(file), "-m", folder, *arguments]) == 0
    assert not store.exists()  # what is measured has nothing to do with it
    shown = json.loads(capsys.readouterr().out)
    assert all(link["seconds_per_byte"] >= 1e-3 for link in shown["costs"]["links"].values())
    assert load_calibration(file).link_bytes_per_s == 1000


def test_a_wrong_setting_costs_no_measurement(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    for wrong in ("nobody:keep=0.5", "random:keep=7", "random:keep"):
        assert main(["calibrate", str(tmp_path / "c.json"), "-m", folder, "--acceptance", wrong]) == 2
    assert main(["calibrate", str(tmp_path / "c.json"), "-m", folder, "--context", "1"]) == 2
    assert not (tmp_path / "c.json").exists()
    assert capsys.readouterr().out == ""


def test_keys_do_not_depend_on_how_numbers_were_written() -> None:
    assert prior_key("x", {"keep": "0.25", "window": 32}) == prior_key("x", {"window": "32", "keep": 0.25})
    assert prior_key("x", {"pooling": "max", "flag": True}) != prior_key("x", {"pooling": "avg", "flag": True})
    assert prior_key("x", {"flag": True}) != prior_key("x", {"flag": 1})
