"""``vericache config``: what is in force and why, whether a file is right, and the schema of such a file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from vericache_core.cli.engine_args import add_engine_arguments, idle_settings, resolve_from_args, tell_what_is_idle
from vericache_core.cli.output import print_json
from vericache_core.config import EngineConfig, ResolvedConfig, config_schema, resolve_config
from vericache_core.errors import ConfigError, OptionError, UnknownCompressorError
from vericache_core.plugins.registry import Registry


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare ``show``, ``validate FILE`` and ``schema``."""
    actions = parser.add_subparsers(dest="action", metavar="{show,validate,schema}", required=True)
    show = actions.add_parser("show", help="the configuration in force, as TOML, with the source of each value")
    add_engine_arguments(show, model=False)
    validate = actions.add_parser("validate", help="check a file, and its options against its compressor")
    validate.add_argument("file", metavar="FILE")
    validate.add_argument("--no-plugins", action="store_true", help="do not load the compressor to check its options")
    schema = actions.add_parser("schema", help="JSON Schema of a configuration file")
    for action in (show, validate, schema):
        action.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    """Run one of the actions."""
    if args.action == "show":
        _show(resolve_from_args(args), as_json=args.json)
    elif args.action == "validate":
        _validate(args)
    else:
        print_json("vericache.config.schema/1", config_schema())
    return 0


def _show(resolved: ResolvedConfig, *, as_json: bool) -> None:
    values = resolved.config.to_json()
    if as_json:
        idle = idle_settings(resolved, fixed=False)
        print_json("vericache.config.show/1", {"config": values, "sources": dict(resolved.sources), "without_effect": idle})
        return
    tell_what_is_idle(resolved, fixed=False)
    options, disabled = values.pop("options"), values.pop("disable_plugins")
    for key, value in values.items():
        source = resolved.sources.get(key, "default")
        # TOML has no null, so a field that is unset is shown as a comment.
        print(f"# {key} is unset" if value is None else f"{key} = {_toml(value)}  # {source}")
    _table("options", options, resolved.sources.get("options"))
    _table("plugins", {"disable": disabled} if disabled else {}, resolved.sources.get("disable_plugins"))


def _table(name: str, values: Mapping[str, Any], source: str | None) -> None:
    if values:
        print(f"\n[{name}]  # {source}")
        for key, value in values.items():
            print(f"{_toml(key)} = {_toml(value)}")


def _toml(value: Any) -> str:
    """Return a scalar or list in TOML, whose strings are JSON strings but for the character DEL."""
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")


def _validate(args: argparse.Namespace) -> None:
    try:
        resolved = resolve_config(args.file, env={})
    except ConfigError as error:
        if error.message.startswith((args.file, "configuration file")):
            raise
        raise ConfigError(f"{args.file}: {error.message}", cause=error.cause, hint=error.hint) from error
    config = resolved.config
    checked = _check_options(config, args.file) if config.compressor and not args.no_plugins else False
    if args.json:
        facts = {"file": args.file, "valid": True, "options_checked": checked}
        idle = idle_settings(resolved, fixed=False)
        print_json("vericache.config.validate/1", {**facts, "without_effect": idle})
    else:
        tell_what_is_idle(resolved, fixed=False)
        print(
            f"{args.file}: OK" + ("" if checked or not config.compressor else f" (options of {config.compressor} not checked)")
        )


def _check_options(config: EngineConfig, file: str) -> bool:
    """Check the options against the compressor, which has to be loaded for that."""
    assert config.compressor is not None
    registry = Registry.from_env(disable=config.disable_plugins)
    try:
        registry.check_options(config.compressor, config.compressor_options())
    except (OptionError, UnknownCompressorError) as error:
        raise ConfigError(f"{file}: {error.message}", cause=error.cause, hint=error.hint) from error
    return True
