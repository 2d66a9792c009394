"""Layers of a configuration: a TOML file, the environment and arguments, one over the other.

Later layers win: defaults < file < ``VERICACHE_<FIELD>`` < arguments. Two rules make layers sensible:
a layer that sets ``keep`` replaces a lower ``keep_tokens`` and the other way round, and a layer that names
another compressor drops the options that a lower layer gave for the former one (naming none drops the budget too).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from vericache_core.config.files import read_file, typed
from vericache_core.config.settings import EngineConfig
from vericache_core.errors import ConfigError
from vericache_core.plugins.fields import coerce, did_you_mean, option_fields

ENV_PREFIX: Final = "VERICACHE_"
# Variables that steer the program and are not fields of the configuration.
CONTROLS: Final = frozenset(f"{ENV_PREFIX}{name}" for name in ("CACHE", "DEBUG", "PLUGINS", "STRICT_PLUGINS", "TRACE_PLUGINS"))

log = logging.getLogger("vericache.config")


@dataclass(frozen=True)
class ResolvedConfig:
    """A configuration and, for each field that is not at its default, the layer that set it."""

    config: EngineConfig
    sources: Mapping[str, str]


def load_config(
    file: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> EngineConfig:
    """Build a configuration from a TOML file, the environment (None: this process's) and explicit arguments."""
    return resolve_config(file, env, overrides).config


def resolve_config(
    file: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> ResolvedConfig:
    """Like `load_config`, and say where each value comes from."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    if file is not None:
        name = os.fspath(file)
        _merge(values, sources, read_file(name), f"file {name}")
    _merge(values, sources, read_env(os.environ if env is None else env), "environment")
    _merge(values, sources, typed(overrides or {}, "argument "), "arguments")
    return ResolvedConfig(EngineConfig(**values), sources)


def read_env(env: Mapping[str, str]) -> dict[str, Any]:
    """Read the fields that the environment sets; an empty variable counts as unset."""
    fields = option_fields(EngineConfig)
    found = {}
    for variable, value in env.items():
        if not variable.startswith(ENV_PREFIX) or variable in CONTROLS or not value:
            continue
        key = variable.removeprefix(ENV_PREFIX).lower()
        if key in fields:
            found[key] = coerce(fields[key], value, text=True, label=variable, error=ConfigError)
        else:  # not an error: another program may own a variable with our prefix
            near = did_you_mean(key, fields)
            suffix = f"; did you mean {ENV_PREFIX}{near.upper()}?" if near else ""
            log.warning("ignored environment variable %s, which is no setting%s", variable, suffix)
    return found


def _merge(values: dict[str, Any], sources: dict[str, str], layer: Mapping[str, Any], source: str) -> None:
    """Put a layer over the lower ones, under the rules in the module's docstring."""
    dropped: set[str] = set()
    if "compressor" in layer and layer["compressor"] != values.get("compressor"):
        dropped |= {"options"} if layer["compressor"] else {"options", "keep", "keep_tokens"}
    for name, other in (("keep", "keep_tokens"), ("keep_tokens", "keep")):
        # Both in one layer stay, so that EngineConfig reports the conflict.
        if layer.get(name) is not None and other not in layer:
            dropped.add(other)
    for name in dropped:
        values.pop(name, None)
        sources.pop(name, None)
    for key, value in layer.items():
        values[key] = {**values.get("options", {}), **value} if key == "options" else value
        sources[key] = source
