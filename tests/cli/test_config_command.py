from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest

from vericache_core.cli.engine_args import add_engine_arguments, config_from_args, registry_from_args
from vericache_core.cli.main import main
from vericache_core.cli.parser import Parser
from vericache_core.config import EngineConfig, load_config
from vericache_core.errors import ConfigError, UsageError
from vericache_core.plugins.fields import option_fields
from vericache_core.plugins.registry import Registry, default_registry


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, vericache_registry: Registry) -> None:
    for field in option_fields(EngineConfig):
        monkeypatch.delenv(f"VERICACHE_{field.upper()}", raising=False)
    monkeypatch.setenv("VERICACHE_PLUGINS", "")


def parse(*argv: str) -> argparse.Namespace:
    parser = Parser(prog="test")
    add_engine_arguments(parser)
    return parser.parse_args(argv)


def test_arguments_become_a_configuration() -> None:
    args = parse(
        "-m", "folder", "-c", "snapkv", "--keep-tokens", "512", "-o", "kernel=7", "-o", "mode=a=b", "--window", "4",
        "--full-kv", "disk", "--identity", "token", "--dtype", "float32", "--rows", "16", "--device", "cpu", "--threads", "2",
        "--swap-dir", "/tmp/x", "--fold", "0", "--no-probe", "--disable-plugin", "a", "--disable-plugin", "b",
    )  # fmt: skip
    assert args.model == "folder"
    assert config_from_args(args) == EngineConfig(
        compressor="snapkv", keep_tokens=512, options={"kernel": "7", "mode": "a=b"}, window=4, full_kv="disk",
        identity="token", dtype="float32", rows=16, device="cpu", threads=2, swap_dir="/tmp/x", fold=0, probe=False,
        disable_plugins=("a", "b"),
    )  # fmt: skip


def test_nothing_given_is_the_default() -> None:
    args = parse()
    assert args.model == "demo"
    assert config_from_args(args) == EngineConfig()


def test_every_field_can_be_given_on_the_command_line() -> None:
    parser = Parser()
    add_engine_arguments(parser)
    assert set(option_fields(EngineConfig)) <= {action.dest for action in parser._actions}


def test_help_says_that_a_switch_takes_true_or_false() -> None:
    parser = Parser()
    add_engine_arguments(parser)
    taken = {action.dest: action.metavar for action in parser._actions}
    assert taken["require_conformant"] == taken["remote_plaintext"] == "{true,false}"
    assert config_from_args(parse("--require-conformant", "true")).require_conformant


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["-c", "x", "--keep", "0.5", "--keep-tokens", "8"], "both given"),
        (["-c", "x", "--keep", "0.5", "-o", "keep=0.25"], "beside a budget"),
        (["-c", "x", "--keep", "1.5"], "^--keep: expected a number > 0 and <= 1, got '1.5'"),
        (["-c", "x", "--keep", "nan"], "^--keep: expected"),
        (["--window", "0"], "^--window: expected an integer >= 1"),
        (["--full-kv", "tape"], "^--full-kv: expected one of device, host, disk"),
        (["--keep", "0.5"], "keep is given without a compressor"),
        (["-o", "bits=2"], "options is given without a compressor"),
        (["-c", "none", "--keep", "0.5"], "without a compressor"),
        (["--config", "/no/such/file.toml"], "does not exist"),
    ],
)
def test_conflicts_and_bad_values(argv: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        config_from_args(parse(*argv))


@pytest.mark.parametrize(("pairs", "reason"), [(["bits"], "key=value"), (["=2"], "key=value"), (["a=1", "a=2"], "twice")])
def test_malformed_pairs(pairs: list[str], reason: str) -> None:
    argv = [word for pair in pairs for word in ("-o", pair)]
    with pytest.raises(UsageError, match=reason):
        config_from_args(parse("-c", "x", *argv))


def test_none_on_the_command_line_overrides_the_files_compressor(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('compressor = "snapkv"\nkeep = 0.5\n')
    assert config_from_args(parse("--config", str(file), "-c", "none")) == EngineConfig()


def test_registry_from_args_is_the_one_of_the_process() -> None:
    args = parse("--no-plugins", "--disable-plugin", "random")
    registry = registry_from_args(args, config_from_args(args))
    assert default_registry() is registry
    assert registry.names() == ["adversarial", "identity"]


def test_show_prints_toml_that_reads_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["-c", "snapkv", "--keep", "0.25", "-o", 'label=a "quoted" \x7f é', "--disable-plugin", "x", "--no-probe"]
    assert main(["config", "show", *argv]) == 0
    out = capsys.readouterr().out
    assert "keep = 0.25  # arguments" in out
    assert "window = 8  # default" in out
    file = tmp_path / "c.toml"
    file.write_text(out, encoding="utf-8")
    assert load_config(file, {}) == config_from_args(parse(*argv))


def test_show_json_says_where_values_come_from(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("VERICACHE_ROWS", "64")
    assert main(["config", "show", "--json", "--window", "2"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["schema"] == "vericache.config.show/1"
    assert (document["config"]["rows"], document["config"]["window"]) == (64, 2)
    assert document["sources"] == {"rows": "environment", "window": "arguments"}


def test_validate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.toml"
    file.write_text('compressor = "random"\nkeep = 0.5\n[options]\nseed = 3\n')
    assert main(["config", "validate", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: OK\n"
    assert main(["config", "validate", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "schema": "vericache.config.validate/1", "file": str(file), "valid": True, "options_checked": True,
        "without_effect": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("windw = 3", "did you mean 'window'"),
        ('compressor = "randon"', "did you mean 'random'"),
        ('compressor = "random"\n[options]\nsede = 3', "did you mean 'seed'"),
        ('compressor = "random"\n[options]\nseed = -3', "seed: expected an integer >= 0"),
        ("keep = ", r":1: not valid TOML"),
        ("keep = 0.5\nkeep_tokens = 9", "are both given"),
        ('device = "gpu0"', "device: expected auto, cpu"),
    ],
)
def test_validate_refuses_with_the_file_and_the_reason(
    text: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    assert main(["config", "validate", str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert str(file) in captured.err
    assert re.search(reason, captured.err)


def test_validate_without_plugins_does_not_need_the_compressor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.toml"
    file.write_text('compressor = "not-installed"\n')
    assert main(["config", "validate", str(file), "--no-plugins"]) == 0
    assert "options of not-installed not checked" in capsys.readouterr().out


def test_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "vericache.config.schema/1"
    assert document["properties"]["window"]["anyOf"][0]["minimum"] == 1
