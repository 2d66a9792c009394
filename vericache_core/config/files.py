"""Configuration files: TOML, checked by key, and the JSON Schema that describes one."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vericache_core.config.settings import EngineConfig, refuse_unknown
from vericache_core.errors import ConfigError
from vericache_core.plugins.fields import coerce, option_fields
from vericache_core.plugins.schema import options_schema

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def config_schema() -> dict[str, Any]:
    """Return the JSON Schema of a configuration file."""
    schema = options_schema(EngineConfig)
    disable = schema["properties"].pop("disable_plugins")
    schema["properties"]["plugins"] = {
        "type": "object",
        "additionalProperties": False,
        "properties": {"disable": disable},
    }
    schema["not"] = {"required": ["keep", "keep_tokens"]}
    schema["description"] = (
        "Of the rules across settings this schema states one, that keep and keep_tokens are not both given; "
        "`vericache config validate FILE` checks all of them."
    )
    return schema


def read_file(file: str) -> dict[str, Any]:
    """Read and check a TOML file; every message names the file and the key or line."""
    try:
        text = Path(file).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"configuration file {file!r} does not exist") from None
    except OSError as error:
        raise ConfigError(f"configuration file {file!r} cannot be read", cause=error.strerror) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text", cause=str(error)) from error
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # Its text ends in "(at line N, column M)" or "(at end of document)".
        line = re.search(r"at line (\d+)", str(error))
        number = line.group(1) if line else max(len(text.splitlines()), 1)
        raise ConfigError(f"{file}:{number}: not valid TOML: {error}") from error
    plugins = document.pop("plugins", {})
    if not isinstance(plugins, dict):
        raise ConfigError(f"{file}: plugins: expected a table")
    refuse_unknown(plugins, file, known=("disable",), prefix="plugins.")
    if "disable" in plugins:
        if "disable_plugins" in document:
            raise ConfigError(f"{file}: disable_plugins and plugins.disable are both given", hint="give only one")
        document["disable_plugins"] = plugins["disable"]
    return typed(document, f"{file}: ")


def typed(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Fields of the configuration out of ``values`` of JSON or TOML types; errors begin with ``where``."""
    fields = option_fields(EngineConfig)
    refuse_unknown(values, where.rstrip(": "))
    return {
        key: coerce(fields[key], value, text=False, label=f"{where}{key}", error=ConfigError) for key, value in values.items()
    }
