from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vericache_core.cli.main import main
from vericache_core.plugins.spec import API_VERSION, CAPABILITIES
from vericache_core.plugins.testing import write_distribution

GOOD = """
from dataclasses import dataclass
from vericache_core.plugins.hooks import hookimpl
from vericache_core.plugins.options import Budget, option
from vericache_core.plugins.spec import CompressorSpec

@dataclass(frozen=True)
class Options(Budget):
    kernel: int = option(5, help="pooling width", ge=1)

class Compressor:
    def __init__(self, options):
        pass
    def compress(self, prefix, context):
        return None

@hookimpl
def vericache_compressors():
    return [CompressorSpec("good", Compressor, Options, "token-drop", 1, "keeps the good", {"extend": "yes"})]
"""


@pytest.fixture
def installed(plugin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_distribution(plugin_folder, "good-dist", {"good": "good_mod"}, {"good_mod": GOOD}, version="1.2")
    write_distribution(plugin_folder, "bad-dist", {"bad": "bad_mod"}, {"bad_mod": "raise ImportError('no luck')"})
    monkeypatch.setenv("VERICACHE_PLUGINS", "good,bad")  # whatever else is installed stays out
    return plugin_folder


def out_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_list(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "DISTRIBUTION", "VERSION", "STATUS", "CONFORMANCE", "SUMMARY"]
    assert any(line.split()[:4] == ["good", "good-dist", "1.2", "ok?"] for line in lines)
    assert any(line.split()[:4] == ["bad", "bad-dist", "0.1", "ok?"] for line in lines)
    assert any(line.startswith("identity ") for line in lines)


def test_list_json(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "list", "--json"]) == 0
    document = out_json(capsys)
    assert document["schema"] == "vericache.plugins.list/1"
    plugins = document["plugins"]
    good = next(plugin for plugin in plugins if plugin["name"] == "good")
    assert (good["distribution"], good["version"], good["status"], good["target"]) == ("good-dist", "1.2", "ok?", "good_mod")


def test_list_without_plugins_and_with_a_disable_list(
    installed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plugins", "list", "--no-plugins"]) == 0
    assert "good" not in capsys.readouterr().out
    config = tmp_path / "c.toml"
    config.write_text('[plugins]\ndisable = ["good"]\n')
    assert main(["plugins", "list", "--config", str(config)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("good"))
    assert line.split()[3] == "disabled"


def test_check(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "check", "good"]) == 0
    assert capsys.readouterr().out.startswith(f"good: OK (API version {API_VERSION}, ")
    assert main(["plugins", "check", "good", "bad"]) == 1
    out = capsys.readouterr().out
    assert "good: OK" in out
    assert "bad: FAILED: compressor 'bad' (bad-dist 0.1) could not be loaded (ImportError: no luck)" in out


def test_check_json(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "check", "bad", "--json"]) == 1
    document = out_json(capsys)
    assert document["schema"] == "vericache.plugins.check/1"
    [result] = document["plugins"]
    assert result["status"] == "failed"
    assert result["error"]["type"] == "PluginLoadError"


def test_an_unknown_name_is_a_usage_error_with_a_hint(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for action in ("check", "show"):
        assert main(["plugins", action, "goood"]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "did you mean 'good'?" in captured.err
        assert "try: pip install vericache-compressor-goood" in captured.err


def test_show(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "show", "good"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("good: keeps the good\n")
    assert "good-dist 1.2" in out
    assert all(word in out for word in ("kernel", "pooling width", "an integer >= 1", "keep_tokens", *CAPABILITIES))


def test_show_json(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "show", "good", "--json"]) == 0
    document = out_json(capsys)
    assert document["schema"] == "vericache.plugins.show/1"
    assert document["kind"] == "token-drop"
    assert document["capabilities"] == {name: default for name, (default, _) in CAPABILITIES.items()} | {"extend": "yes"}
    options = document["options"]
    assert options["properties"]["kernel"]["minimum"] == 1
