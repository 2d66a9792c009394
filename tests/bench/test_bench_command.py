from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.models import engine_over, model, prompt
from vericache_core.bench import prompts as prompts_module
from vericache_core.bench.prompts import BenchPrompt
from vericache_core.cli.bench import DEFAULTS, SCHEMA
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


def test_json_lines_have_every_key_of_the_form(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table = tmp_path / "table.md"
    flags = ["-c", "random:keep=0.5,seed=2", "-c", "random+adversarial:keep=0.5", "--new-tokens", "12", "--no-plugins"]
    assert main(["bench", "compressors", *flags, "--json", "--markdown", str(table)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["compressor"], line["prompt"]) for line in lines] == [
        (name, which) for which in ("one", "two") for name in ("random", "random+adversarial")
    ]
    asked = {"compressor", "options", "prompt", "keep_bytes_fraction", "accepted_mean", "hazard", "kl_nats"}
    for line in lines:
        assert line["schema"] == SCHEMA
        assert asked | {"first_divergence", "identical", "full_parses", "lossy_parses"} <= set(line)
        assert line["identical"] is True
        assert set(line["accepted_mean"]) == {"4", "8", "16", "32"}
    assert lines[0]["options"] == {"keep": "0.5", "seed": "2"}
    assert table.read_text().count("random+adversarial") == 2


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
    ],
)
def test_mistakes_are_reported_before_the_model_is_loaded(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "compressors", "--no-plugins", *flags]) == 2
    assert words in capsys.readouterr().err
