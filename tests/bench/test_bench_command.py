from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.models import engine_over, model, prompt
from vericache_core.bench import prompts as prompts_module
from vericache_core.bench.lines import SCHEMA
from vericache_core.bench.prompts import BenchPrompt
from vericache_core.cli.bench import DEFAULTS
from vericache_core.cli.main import main
from vericache_core.engine import Engine
from vericache_core.plugins.registry import set_default_registry


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tiny model and two short prompts in place of the ones asked for."""
    made = [BenchPrompt(name, tuple(prompt(40, seed=i)), (), "json") for i, name in enumerate(("one", "two"))]
    monkeypatch.setattr(prompts_module, "build_prompts", lambda *_: made)
    monkeypatch.setattr(Engine, "from_pretrained", lambda *_: engine_over(model("llama")))
    yield
    set_default_registry(None)


NUMBER, TEXT, TRUTH = (int, float), str, bool
MAYBE = type(None)
FORM: dict[str, Any] = {
    "schema": TEXT,
    "model": TEXT,
    "run": dict,
    "compressor": TEXT,
    "options": dict,
    "prompt": TEXT,
    "prompt_tokens": int,
    "new_tokens": int,
    "keep_bytes_fraction": (*NUMBER, MAYBE),
    "accepted_mean": dict,
    "hazard": (*NUMBER, MAYBE),
    "hazard_by_window": dict,
    "kl_nats": (*NUMBER, MAYBE),
    "first_divergence": (int, MAYBE),
    "full_parses": (TRUTH, MAYBE),
    "lossy_parses": (TRUTH, MAYBE),
    "compress_seconds": (*NUMBER, MAYBE),
    "prefill_seconds": (*NUMBER, MAYBE),
    "identical": (TRUTH, MAYBE),
    "error": (TEXT, MAYBE),
}
"""Every key of a line and what it may be; others read these lines, so keys are only ever added."""


def check_form(line: dict[str, Any]) -> None:
    assert line.keys() == FORM.keys()
    for key, kinds in FORM.items():
        assert isinstance(line[key], kinds), key
    assert line["schema"] == SCHEMA == "vericache.bench.compressors/1"
    assert line["accepted_mean"].keys() == (set() if line["error"] else {"4", "8", "16", "32"})
    for window, mean in line["accepted_mean"].items():
        assert mean is None or 0 <= mean <= int(window)
    assert line["hazard_by_window"].keys() == line["accepted_mean"].keys()
    assert all(chance is None or 0 <= chance <= 1 for chance in line["hazard_by_window"].values())
    assert line["hazard"] is None or 0 <= line["hazard"] <= 1
    assert line["kl_nats"] is None or line["kl_nats"] >= 0


def test_json_lines_have_every_key_of_the_form(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table = tmp_path / "table.md"
    flags = ["-c", "random:keep=0.5,seed=2", "-c", "random+adversarial:keep=0.5", "--new-tokens", "12", "--no-plugins"]
    assert main(["bench", "compressors", *flags, "--json", "--markdown", str(table)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["compressor"], line["prompt"]) for line in lines] == [
        (name, which) for which in ("one", "two") for name in ("random", "random+adversarial")
    ]
    for line in lines:
        check_form(line)
        assert line["identical"] is True
        assert line["run"] == {"context": 4000, "new_tokens": 12, "window": 8, "dtype": "auto"}
    assert lines[0]["options"] == {"keep": "0.5", "seed": "2"}
    assert table.read_text().count("random+adversarial") == 2


def test_rows_in_a_file_are_shown_and_not_measured_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, table = tmp_path / "rows.jsonl", tmp_path / "table.md"
    flags = ["bench", "compressors", "-c", "identity", "--new-tokens", "6", "--no-plugins", "--lines", str(file)]
    assert main([*flags, "--prompt", "one"]) == 0
    assert main(flags) == 0
    before = file.read_text().splitlines()
    file.write_text("\n".join([before[0], before[1][:50]]))  # killed while it wrote the second row
    assert main([*flags, "--new-tokens", "7"]) == 0  # other conditions: all rows are measured
    assert len(file.read_text().splitlines()) == 4
    capsys.readouterr()
    assert main([*flags, "--json", "--markdown", str(table)]) == 0
    captured = capsys.readouterr()
    lines = [json.loads(line) for line in captured.out.splitlines()]
    assert [line["prompt"] for line in lines] == ["one", "two"]
    assert captured.out.splitlines()[0] == before[0]
    assert file.read_text().splitlines()[-1] == captured.out.splitlines()[1]
    assert "one: full KV" not in captured.err
    assert "two: full KV" in captured.err
    assert table.read_text().count("| identity |") == 2

    def fail(*_: object) -> None:
        raise AssertionError("everything was known")

    monkeypatch.setattr("vericache_core.bench.compressors.run_all", fail)
    assert main(flags) == 0


def test_without_plugins_only_what_the_core_has_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "compressors", "--no-plugins", "--new-tokens", "4"]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["random", "random"]
    assert DEFAULTS[0].startswith("random")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-c", "nothing"], "unknown compressor 'nothing'"),
        (["-c", "random:keep"], "not of the form key=value"),
        (["-c", "random:kep=1"], "did you mean 'keep'"),
        (["--new-tokens", "1"], "--new-tokens must be at least 2"),
        (["--lines", "/nowhere/rows.jsonl"], "--lines /nowhere/rows.jsonl: cannot be read and written"),
    ],
)
def test_mistakes_are_reported_before_the_model_is_loaded(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "compressors", "--no-plugins", *flags]) == 2
    assert words in capsys.readouterr().err
