from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tests.models import build
from vericache_core import Engine, EngineConfig
from vericache_core.errors import ConfigError
from vericache_core.model.probe import run_blocks
from vericache_core.runtime import measure as measuring
from vericache_core.runtime.calibration import Calibration, Fingerprint, load_calibration, prior_key, processor_name
from vericache_core.runtime.costs import CostModel, Link, fit
from vericache_core.runtime.hazard import Prior

HERE = Fingerprint("EPYC", 2, "2.13.0", "demo", "abc", "bfloat16")
SAVED = Calibration(HERE, CostModel({8: 0.1}, 1e-10, 1e-8, {"disk": Link(0.1, 1e-9)}, 30), {"snapkv {}": Prior(0.02, 99)})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    SAVED.save(tmp_path / "costs.json")
    return tmp_path / "costs.json"


def test_a_file_comes_back_as_it_was(file: Path) -> None:
    assert load_calibration(file, HERE) == SAVED
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Fingerprint)])
def test_a_file_of_another_machine_or_model_is_refused_and_says_what_differs(file: Path, field: str) -> None:
    changed: Any = {field: 64 if field == "threads" else "other"}
    other = dataclasses.replace(HERE, **changed)
    with pytest.raises(ConfigError, match="another machine or model") as caught:
        load_calibration(file, other)
    assert caught.value.cause is not None
    assert field in caught.value.cause
    assert ";" not in caught.value.cause
    assert "vericache calibrate" in str(caught.value.hint)
    assert load_calibration(file) == SAVED  # a simulation may look at any machine


def damage(document: dict[str, Any], *path: str, value: Any) -> str:
    at = document
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        (["schema"], "vericache.calibration/9", "this version"),
        (["schema"], "vericache.calibration/1", "this version"),
        (["fingerprint"], {"threads": 2}, "damaged"),
        (["costs", "read_seconds_per_byte"], -1, "damaged"),
        (["costs", "shapes"], {}, "damaged"),
        (["costs", "links"], [1], "damaged"),
        (["priors", "snapkv {}"], {"hazard": 2, "weight": 1}, "damaged"),
        (["priors"], None, "damaged"),
        (["link_bytes_per_s"], -1, "damaged"),
    ],
)
def test_broken_files_are_one_clear_error(file: Path, path: list[str], value: Any, match: str) -> None:
    file.write_text(damage(json.loads(file.read_text()), *path, value=value))
    with pytest.raises(ConfigError, match=match) as caught:
        load_calibration(file, HERE)
    assert "costs.json" in caught.value.message
    assert caught.value.cause


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "\x00"])
def test_other_files_are_refused(file: Path, text: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match="not a calibration file"):
        load_calibration(file)


def test_a_missing_file_and_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_calibration(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_calibration(tmp_path)
    with pytest.raises(ConfigError, match="cannot be written"):
        SAVED.save(tmp_path / "no" / "costs.json")


def test_the_key_of_a_prior_is_the_same_in_any_order_of_options() -> None:
    assert prior_key("snapkv", {"keep": 0.25, "window": 32}) == prior_key("snapkv", {"window": 32, "keep": 0.25})
    assert prior_key("snapkv", {"keep": 0.25}) != prior_key("snapkv", {"keep": 0.5})


def test_this_machine_has_a_name() -> None:
    assert processor_name()


def test_a_step_of_a_shape_is_measured_with_as_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(build("llama"), config=EngineConfig(rows=10)) as engine:
        ran: list[int] = []
        loads: list[int] = []

        def counted(adapter: Any, attend: Any, parts: Any, shift: int = 0) -> Any:
            ran.append(sum(len(ids) for _, ids in parts))
            return run_blocks(adapter, attend, parts, shift)

        def seen(steps: Any, swaps: Any, layers: int) -> Any:
            loads.extend(sample.load.rows for sample in steps)
            return fit(steps, swaps, layers)

        monkeypatch.setattr(measuring, "run_blocks", counted)
        monkeypatch.setattr(measuring, "fit", seen)
        costs = measuring.measure(engine.adapter, engine.attend, repeats=1)
        shapes = engine.adapter.shapes
    assert len(shapes) > 3
    assert set(costs.shapes) == set(shapes)
    assert [next(shape for shape in shapes if shape >= rows) for rows in ran] == loads
