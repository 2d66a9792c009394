"""The engine's arguments, shared by every command that runs a model; derived from the fields of EngineConfig."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, Final

from vericache_core.cli.output import note
from vericache_core.config import EngineConfig, ResolvedConfig, resolve_config, without_effect
from vericache_core.errors import ConfigError, UsageError
from vericache_core.plugins.fields import OptionField, coerce, did_you_mean, option_fields, parse_pairs
from vericache_core.plugins.registry import Registry, set_default_registry

DEFAULT_MODEL: Final = "demo"
# These have an argument of their own below, of another form than `--field VALUE`.
_SPECIAL: Final = frozenset({"options", "disable_plugins", "probe"})


def add_engine_arguments(parser: argparse.ArgumentParser, *, model: bool = True) -> None:
    """Add ``-m``, ``-c``, ``--keep``, ``-o`` and one argument per field of the configuration."""
    if model:
        parser.add_argument(
            "-m",
            "--model",
            default=DEFAULT_MODEL,
            help="demo (the small real model), a Hugging Face folder or hub id, or a GGUF file [%(default)s]",
        )
    group = parser.add_argument_group("engine", "each overrides VERICACHE_<NAME>, which overrides --config FILE")
    group.add_argument("--config", metavar="FILE", help="TOML file of settings (vericache config schema)")
    for field in option_fields(EngineConfig).values():
        if field.name not in _SPECIAL:
            flags = (["-c"] if field.name == "compressor" else []) + [f"--{field.name.replace('_', '-')}"]
            # Kept as text: `coerce` in config_from_args words every error alike, whichever layer it is from.
            group.add_argument(*flags, dest=field.name, metavar=_metavar(field), help=_help(field))
    group.add_argument(
        "--set", dest="settings", metavar="KEY=VALUE", action="append", help="the same by the name of a setting (repeatable)"
    )
    group.add_argument(
        "-o", "--option", dest="options", metavar="KEY=VALUE", action="append", help="option of the compressor (repeatable)"
    )
    group.add_argument(
        "--probe", action=argparse.BooleanOptionalAction, default=None, help=_help(option_fields(EngineConfig)["probe"])
    )
    group.add_argument(
        "--disable-plugin",
        dest="disable_plugins",
        metavar="NAME",
        action="append",
        help="a compressor or distribution that may not be used (repeatable)",
    )
    group.add_argument("--no-plugins", action="store_true", help="use only the compressors inside the core")


def resolve_from_args(args: argparse.Namespace) -> ResolvedConfig:
    """Return the configuration that a parsed command line asks for, with the source of each value."""
    fields = option_fields(EngineConfig)
    overrides = settings_from_text(args.settings or ())
    for name, field in fields.items():
        value = getattr(args, name, None)
        if value is None:
            continue
        if name in overrides:
            raise UsageError(f"--set {name} and --{name.replace('_', '-')} are both given", hint="give only one of them")
        if name == "options":
            try:
                overrides[name] = parse_pairs(value)
            except ValueError as error:
                raise UsageError(f"-o: {error}", hint="write -o key=value") from None
        else:
            overrides[name] = coerce(field, value, text=True, label=f"--{name.replace('_', '-')}", error=ConfigError)
    resolved = resolve_config(args.config, overrides=overrides)
    config = resolved.config
    config.compressor_options()  # reports a budget that is given in two places
    given = [name for name in ("keep", "keep_tokens", "options") if getattr(config, name)]
    if config.compressor is None and given:
        raise ConfigError(f"{given[0]} is given without a compressor", hint="name one, such as -c snapkv")
    return resolved


def settings_from_text(texts: Sequence[str]) -> dict[str, Any]:
    """Return fields of the configuration that are written as ``KEY=VALUE``; errors name ``--set``."""
    try:
        pairs = parse_pairs(texts)
    except ValueError as error:
        raise UsageError(f"--set: {error}", hint="write --set rows=32") from None
    fields = option_fields(EngineConfig)
    found = {}
    for key, value in pairs.items():
        if key not in fields:
            near = did_you_mean(key, fields)
            suffix = f"; did you mean {near!r}?" if near else ""
            raise UsageError(f"--set: unknown field {key!r}{suffix}", hint="vericache config schema lists them")
        found[key] = coerce(fields[key], value, text=True, label=f"--set {key}", error=UsageError)
    return found


def setting_from_text(text: str, registry: Registry, flag: str = "-c") -> tuple[str, dict[str, str]]:
    """Return name and checked options of a compressor written as ``NAME[:KEY=VALUE,...]``; errors name ``flag``."""
    name, _, options = text.partition(":")
    try:
        pairs = parse_pairs(part for part in options.split(",") if part)
    except ValueError as error:
        raise UsageError(f"{flag} {text}: {error}", hint=f"write {flag} snapkv:keep=0.25,window=32") from None
    registry.check_options(name, pairs)
    return name, pairs


def config_from_args(args: argparse.Namespace) -> EngineConfig:
    """Return the configuration that a parsed command line asks for; conflicts are reported as ConfigError."""
    return resolve_from_args(args).config


def tell_what_is_idle(resolved: ResolvedConfig, *, fixed: bool) -> None:
    """Warn of settings that somebody gave and that do nothing; with ``fixed`` no request names a compressor of its own."""
    tell_idle(resolved, idle_settings(resolved, fixed=fixed))


def tell_idle(resolved: ResolvedConfig, idle: Mapping[str, str]) -> None:
    """Warn of settings that do nothing, and say why, and where they were given."""
    for name, because in idle.items():
        note(f"warning: {name} ({resolved.sources[name]}) has no effect: {because}")


def idle_settings(resolved: ResolvedConfig, *, fixed: bool) -> dict[str, str]:
    """Settings that somebody gave and that do nothing, and why."""
    return without_effect(resolved.config, given_settings(resolved), fixed=fixed)


def given_settings(resolved: ResolvedConfig) -> list[str]:
    """Settings that somebody gave, and not to say that there is to be nothing."""
    return [name for name in resolved.sources if getattr(resolved.config, name) not in (None, (), {})]


def registry_from_args(args: argparse.Namespace, config: EngineConfig) -> Registry:
    """Make the registry that the command line and configuration ask for the one of this process."""
    registry = Registry.from_env(disable=config.disable_plugins, no_plugins=args.no_plugins)
    set_default_registry(registry)
    return registry


def _metavar(field: OptionField) -> str:
    if field.type.base is bool:
        return "{true,false}"
    if field.type.choices is not None:
        return "{" + ",".join(map(str, field.type.choices)) + "}"
    return {int: "N", float: "X"}.get(field.type.base, "TEXT" if field.name == "device" else "NAME")


def _help(field: OptionField) -> str:
    default = "none" if field.default is None else str(field.default).lower() if field.type.base is bool else str(field.default)
    return f"{field.info.help} [{default}]".replace("%", "%%")
