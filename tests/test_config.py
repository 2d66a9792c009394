from __future__ import annotations

import dataclasses
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from vericache_core.config import CONTROLS, EngineConfig, config_schema, load_config, read_env, replace, resolve_config
from vericache_core.errors import ConfigError
from vericache_core.plugins.fields import option_fields


def write(folder: Path, text: str) -> Path:
    path = folder / "vericache.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults() -> None:
    config = EngineConfig()
    assert (config.compressor, config.identity, config.full_kv, config.window, config.rows) == (None, "bitwise", "host", 8, 32)
    assert config.compressor_options() == {}


def test_every_field_has_help_and_is_immutable() -> None:
    assert all(field.info.help for field in option_fields(EngineConfig).values())
    config = EngineConfig(options={"bits": 2})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.window = 3  # type: ignore[misc]  # the point of the test
    with pytest.raises(TypeError):
        config.options["bits"] = 4  # type: ignore[index]  # the point of the test


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("keep", 0), ("keep", 1.5), ("keep", -0.1), ("keep", float("nan")), ("keep", "0.5"), ("keep", True),
        ("keep_tokens", 0), ("keep_tokens", 1.0), ("window", 0), ("window", "8"), ("window", None), ("rows", 1), ("rows", 1025),
        ("identity", "exact"), ("full_kv", "cloud"), ("dtype", "int8"), ("threads", 0), ("ring_layers", 1), ("ring_layers", 5),
        ("fold", -1), ("max_model_len", 0), ("on_compressor_error", "ignore"), ("on_swap_error", ""), ("probe", 1),
        ("attention", "cudnn"), ("device", "GPU 0"), ("device", ""), ("compressor", ""), ("compressor", 3), ("swap_dir", ""),
        ("options", [1]), ("options", {1: 2}), ("disable_plugins", "one"), ("disable_plugins", [1]),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: expected"):
        EngineConfig(**{key: value})


@pytest.mark.parametrize("good", [{"window": 1}, {"rows": 2}, {"rows": 1024}, {"fold": 0}, {"device": "cuda:1"}, {"keep": 1}])
def test_the_ends_of_the_ranges_are_legal(good: dict[str, Any]) -> None:
    EngineConfig(**good)


def test_both_budgets_are_a_conflict() -> None:
    with pytest.raises(ConfigError, match=r"keep=0.5 and keep_tokens=8 are both given"):
        EngineConfig(keep=0.5, keep_tokens=8)


def test_the_budget_joins_the_options_of_the_compressor() -> None:
    config = EngineConfig(compressor="snapkv", keep=0.5, options={"kernel": 3})
    assert config.compressor_options() == config.options_of("snapkv") == {"kernel": 3, "keep": 0.5}
    assert config.options_of("kivi") == {}
    for inside in ({"keep": 0.5}, {"keep_tokens": "4"}):
        with pytest.raises(ConfigError, match="beside a budget"):
            EngineConfig(keep_tokens=8, options=inside).compressor_options()


def test_layers_file_environment_arguments(tmp_path: Path) -> None:
    file = write(
        tmp_path, 'compressor = "snapkv"\nwindow = 4\nrows = 16\nfold = 1\n[options]\nkernel = 5\n[plugins]\ndisable = ["x"]\n'
    )
    env = {"VERICACHE_WINDOW": "5", "VERICACHE_ROWS": "64", "VERICACHE_PROBE": "no", "VERICACHE_THREADS": "", "HOME": "x"}
    resolved = resolve_config(file, env, {"rows": 128, "options": {"mode": "sum"}})
    config = resolved.config
    assert (config.compressor, config.fold, config.window, config.rows, config.probe, config.threads) == (
        "snapkv",
        1,
        5,
        128,
        False,
        None,
    )
    assert config.options == {"kernel": 5, "mode": "sum"}
    assert config.disable_plugins == ("x",)
    assert resolved.sources["window"] == "environment"
    assert resolved.sources["rows"] == "arguments"
    assert resolved.sources["fold"] == f"file {file}"
    assert "identity" not in resolved.sources


def test_a_higher_layer_replaces_the_other_form_of_the_budget(tmp_path: Path) -> None:
    file = write(tmp_path, "keep = 0.5\n")
    config = load_config(file, {"VERICACHE_KEEP_TOKENS": "64"})
    assert (config.keep, config.keep_tokens) == (None, 64)
    config = load_config(file, {"VERICACHE_KEEP_TOKENS": "64"}, {"keep": 0.25})
    assert (config.keep, config.keep_tokens) == (0.25, None)


@pytest.mark.parametrize("env", [{"VERICACHE_KEEP": "0.5", "VERICACHE_KEEP_TOKENS": "4"}])
def test_both_budgets_in_one_layer_stay_a_conflict(env: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="both given"):
        load_config(None, env)
    with pytest.raises(ConfigError, match="both given"):
        load_config(write(tmp_path, "keep = 0.5\nkeep_tokens = 4\n"), {})
    with pytest.raises(ConfigError, match="both given"):
        load_config(None, {}, {"keep": 0.5, "keep_tokens": 4})


def test_options_belong_to_the_compressor_they_were_given_for(tmp_path: Path) -> None:
    file = write(tmp_path, 'compressor = "snapkv"\nkeep = 0.5\n[options]\nkernel = 5\n')
    assert load_config(file, {}, {"compressor": "kivi", "options": {"bits": 2}}).options == {"bits": 2}
    assert load_config(file, {}, {"compressor": "snapkv"}).options == {"kernel": 5}
    plain = load_config(file, {}, {"compressor": None})
    assert (plain.compressor, plain.keep, plain.options) == (None, None, {})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("windw = 3", r"unknown key 'windw'; did you mean 'window'\?"),
        ("[plugins]\ndisabel = []", r"unknown key 'plugins.disabel'; did you mean 'plugins.disable'\?"),
        ("plugins = 3", "plugins: expected a table"),
        ("window = 'many'", "window: expected an integer"),
        ("window = 8.0", "window: expected an integer"),
        ("options = 3", "options: expected a table"),
        ("[window]\nx = 1", "window: expected an integer"),
        ("disable_plugins = ['a']\n[plugins]\ndisable = ['b']", "both given"),
        ("[plugins]\ndisable = 'a'", "disable_plugins: expected a list"),
        ("rows = 32\n\nwindow = = 3\n", r"vericache.toml:3: not valid TOML"),
        ("rows = 32\nrows = 33\n", "not valid TOML"),
        ("keep = nan", "keep: expected"),
    ],
)
def test_a_bad_file_is_refused_with_file_and_key(text: str, reason: str, tmp_path: Path) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError, match=reason) as caught:
        load_config(file, {})
    assert str(file) in caught.value.message


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "none.toml", {})
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path, {})
    (tmp_path / "latin.toml").write_bytes(b'device = "\xe9"')
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_config(tmp_path / "latin.toml", {})


def test_environment_errors_name_the_variable() -> None:
    with pytest.raises(ConfigError, match=r"^VERICACHE_WINDOW: expected an integer >= 1 or auto, got 'x'"):
        load_config(None, {"VERICACHE_WINDOW": "x"})


def test_environment_of_tables_and_lists() -> None:
    config = load_config(
        None, {"VERICACHE_OPTIONS": "bits=2, group=32", "VERICACHE_DISABLE_PLUGINS": "a,b", "VERICACHE_KEEP": "none"}
    )
    assert config.options == {"bits": "2", "group": "32"}
    assert config.disable_plugins == ("a", "b")


def test_an_unknown_variable_is_warned_about_but_controls_are_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load_config(None, {"VERICACHE_WINDW": "3", **dict.fromkeys(CONTROLS, "1")})
    assert [record.getMessage() for record in caplog.records] == [
        "ignored environment variable VERICACHE_WINDW, which is no setting; did you mean VERICACHE_WINDOW?"
    ]


def test_unknown_arguments_and_replace() -> None:
    with pytest.raises(ConfigError, match="did you mean 'compressor'"):
        load_config(None, {}, {"compresor": "x"})
    assert replace(EngineConfig(window=4), rows=64) == EngineConfig(window=4, rows=64)
    with pytest.raises(ConfigError, match="did you mean 'window'"):
        replace(EngineConfig(), windows=3)
    with pytest.raises(ConfigError, match="rows: expected"):
        replace(EngineConfig(), rows=1)


def test_json_round_trip() -> None:
    config = EngineConfig(compressor="kivi", options={"bits": 2}, disable_plugins=("a",), threads=2)
    assert EngineConfig(**json.loads(json.dumps(config.to_json()))) == config


def test_schema_describes_a_file() -> None:
    schema = config_schema()
    json.dumps(schema)
    assert "states one" in schema["description"]  # of the rules across settings
    assert "config validate" in schema["description"]
    assert schema["not"] == {"required": ["keep", "keep_tokens"]}
    names = set(option_fields(EngineConfig)) - {"disable_plugins"} | {"plugins"}
    assert set(schema["properties"]) == names
    assert schema["properties"]["plugins"]["properties"]["disable"]["items"] == {"type": "string"}
    assert schema["properties"]["rows"]["maximum"] == 1024
    assert schema["properties"]["identity"]["enum"] == ["bitwise", "token"]
    assert schema["additionalProperties"] is False


def test_tomli_stands_in_before_python_3_11() -> None:
    module = "tomllib" if sys.version_info >= (3, 11) else "tomli"
    assert module in sys.modules


def test_variables_that_steer_the_program_are_no_settings(caplog: pytest.LogCaptureFixture) -> None:
    assert read_env(dict.fromkeys(CONTROLS, "1") | {"VERICACHE_CACHE": "/tmp"}) == {}
    assert not caplog.records
