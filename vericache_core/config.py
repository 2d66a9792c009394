"""The engine's configuration: one frozen dataclass, filled from a TOML file, the environment and arguments.

Later layers win: defaults < file < ``VERICACHE_<FIELD>`` < arguments. Two rules make layers sensible:
a layer that sets ``keep`` replaces a lower ``keep_tokens`` and the other way round, and a layer that names
another compressor drops the options that a lower layer gave for the former one (naming none drops the budget too).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from vericache_core.errors import ConfigError
from vericache_core.plugins.fields import coerce, did_you_mean, option, option_fields
from vericache_core.plugins.options import check_options, options_to_json
from vericache_core.plugins.schema import options_schema

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENV_PREFIX: Final = "VERICACHE_"
# Variables that steer the program and are not fields of the configuration.
CONTROLS: Final = frozenset(f"{ENV_PREFIX}{name}" for name in ("DEBUG", "PLUGINS", "STRICT_PLUGINS", "TRACE_PLUGINS"))
_DEVICE = re.compile(r"auto|[a-z]+(:\d+)?")

log = logging.getLogger("vericache.config")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How an engine runs. Immutable; every value is checked when it is built (ConfigError)."""

    compressor: str | None = option(None, help="name of the compressor that drafts; none for plain full-KV decoding")
    keep: float | None = option(None, help="fraction of tokens the compressor keeps", gt=0, le=1)
    keep_tokens: int | None = option(None, help="number of tokens the compressor keeps", unit="tokens", ge=1)
    options: Mapping[str, Any] = option(default_factory=dict, help="further options of the compressor")
    identity: Literal["bitwise", "token"] = option("bitwise", help="the promise that is kept, or refused by name")
    full_kv: Literal["device", "host", "disk", "remote"] = option(
        "host", help="tier where the full KV lives; remote: a `vericache store serve` holds it and verifies"
    )
    window: int | Literal["auto"] = option(
        8,
        help="tokens drafted before a verify; auto: as many as pay, by measured costs and each request's own acceptance",
        unit="tokens",
        ge=1,
    )
    proposer: Literal["none", "ngram", "assistant"] = option(
        "none",
        help="guesses many tokens for the drafter, or for the full KV where nothing drafts: "
        "ngram looks in the text so far, assistant asks a small model",
    )
    assistant: str | None = option(None, help="model for proposer=assistant, of the same tokenizer; named as the model is")
    mode: Literal["auto", "plain", "pinned", "offloaded"] = option(
        "offloaded",
        help="plain: no drafts; pinned: full KV stays on the device beside the draft KV; offloaded: it lives on `full_kv`; "
        "auto: the fastest of these by measured costs, within `device_budget`",
    )
    scheduler: Literal["auto", "staggered", "lockstep"] = option(
        "auto",
        help="staggered: verifies of some beside drafts of others; lockstep: all draft, then all verify; "
        "auto: staggered where full KV is swapped or windows are chosen",
    )
    device_budget: int | None = option(None, help="most device bytes for KV; requests beyond it wait", unit="bytes", ge=1)
    host_budget: int | None = option(None, help="most host bytes for offloaded full KV", unit="bytes", ge=1)
    disk_budget: int | None = option(None, help="most disk bytes for offloaded full KV", unit="bytes", ge=1)
    max_running: int = option(1024, help="requests that run at a time", ge=1)
    max_queue: int = option(1024, help="requests that may wait; one more is refused", ge=1)
    calibration: str | None = option(
        None, help="file of `vericache calibrate`; none: window or mode auto measure for about two seconds at start"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option("auto", help="dtype of weights and KV")
    rows: int = option(32, help="query rows of every step; part of the identity contract", ge=2, le=1024)
    shapes: Literal["auto", "one"] = option(
        "auto",
        help="rows of steps: also from a quarter to four times `rows` where the probe finds the same bits, or only `rows`",
    )
    pack_weights: Literal["auto", "always", "never"] = option(
        "auto", help="lay linear weights out for the CPU's kernels, a second copy in memory; auto: models up to 2 GiB"
    )
    fuse: Literal["auto", "never"] = option(
        "auto", help="run decoder layers of known kinds in a few compiled operations on the CPU, where they give the same"
    )
    graphs: Literal["auto", "never"] = option(
        "auto", help="replay what lies between attention calls as CUDA graphs, where that gives the same bits; never elsewhere"
    )
    device: str = option("auto", help="where the model runs: auto, cpu, cuda or cuda:N")
    threads: int | None = option(None, help="CPU threads; none for torch's own choice", ge=1)
    ring_layers: int = option(2, help="layers of full KV on the device at once while it streams in", ge=2, le=4)
    link_bytes_per_s: float | None = option(
        None,
        help="most bytes of full KV a second that come back from `full_kv`; none for as fast as it goes",
        unit="bytes/s",
        gt=0,
    )
    swap_dir: str | None = option(None, help="folder of swap files; none for the system's temporary folder")
    prefix_store: str | None = option(
        None, help="URL of the store of prompts' KV, such as file:///var/cache/vericache?bytes=10GB or shm://name?bytes=2GB"
    )
    tenant: str = option("", help="salt of the prefix store's keys; tenants with different ones share nothing")
    fold: int = option(128, help="tail tokens gathered before the compressor takes them in; 0 for never", unit="tokens", ge=0)
    max_model_len: int | None = option(None, help="longest sequence; none for the model's own", unit="tokens", ge=1)
    on_compressor_error: Literal["plain", "fail"] = option(
        "plain", help="when a compressor raises: decode that request plainly, or fail it"
    )
    on_swap_error: Literal["recompute", "fail"] = option(
        "recompute", help="when full KV cannot be read back: recompute it, or fail the request"
    )
    remote: str | None = option(None, help="HOST:PORT of the store, for full_kv=remote")
    remote_mode: Literal["auto", "local", "remote", "verify", "verify-stateless", "stream", "stream-stateless", "fetch"] = (
        option(
            "verify",
            help="verify: drafts go to the store; remote: the store generates; stream: drafts go to the store while the rest "
            "of the full KV comes, then plain; fetch: full KV first, then plain; local: no link; auto: by measured costs",
        )
    )
    remote_token_file: str | None = option(None, help="file with the token that the store knows this side by")
    remote_ca: str | None = option(None, help="PEM file of who vouches for the store's certificate; turns TLS on")
    remote_cert: str | None = option(None, help="PEM certificate of this side, where the store asks for one")
    remote_key: str | None = option(None, help="PEM key of `remote_cert`")
    remote_plaintext: bool = option(False, help="talk without TLS beyond this machine: something else must guard the link")
    remote_timeout: float = option(10.0, help="longest wait for an answer of the store", unit="seconds", gt=0, le=3600)
    on_remote_error: Literal["recompute", "fail"] = option(
        "recompute", help="when the store or the link fails: go on here with a full KV of our own, or fail the request"
    )
    probe: bool = option(True, help="prove row invariance on this machine before promising it")
    attention: Literal["auto", "reference", "numba", "triton"] = option(
        "auto", help="implementation of attention; auto: triton on CUDA and numba on the CPU, where installed"
    )
    audit_every: int | None = option(
        None, help="decode every N-th drafted answer once more, plainly, and compare; none for never", unit="answers", ge=1
    )
    require_conformant: bool = option(False, help="refuse compressors without a valid conformance passport")
    disable_plugins: tuple[str, ...] = option((), help="compressors or distributions that may not be used")

    def __post_init__(self) -> None:
        check_options(self, error=ConfigError)
        if self.keep is not None and self.keep_tokens is not None:
            raise ConfigError(
                f"keep={self.keep:g} and keep_tokens={self.keep_tokens} are both given", hint="give only one of them"
            )
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"device: expected auto, cpu, cuda or cuda:N, got {self.device!r}")
        if (self.full_kv == "remote") != (self.remote is not None):
            raise ConfigError("full_kv=remote and remote=HOST:PORT go together", hint="give both or neither")
        if (self.remote_cert is None) != (self.remote_key is None):
            raise ConfigError("remote_cert and remote_key go together", hint="give both or neither")
        for name in ("compressor", "swap_dir", "calibration", "prefix_store", "assistant"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name}: expected text, got an empty one")

    def compressor_options(self) -> dict[str, Any]:
        """Return what the compressor is built with: ``options`` with the budget put in.

        Raises ConfigError when the budget is given both as a field and inside ``options``.
        """
        merged = dict(self.options)
        for name in ("keep", "keep_tokens"):
            value = getattr(self, name)
            if value is None:
                continue
            if "keep" in merged or "keep_tokens" in merged:
                raise ConfigError(f"{name}={value:g} is given beside a budget in the options", hint="give only one")
            merged[name] = value
        return merged

    def to_json(self) -> dict[str, Any]:
        """Return every field as JSON types."""
        return options_to_json(self)


@dataclass(frozen=True)
class ResolvedConfig:
    """A configuration and, for each field that is not at its default, the layer that set it."""

    config: EngineConfig
    sources: Mapping[str, str]


def replace(config: EngineConfig, **changes: Any) -> EngineConfig:
    """Return a copy with some fields changed, checked anew; an unknown field is a ConfigError."""
    _refuse_unknown(changes, "replace()")
    return dataclasses.replace(config, **changes)


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
    _merge(values, sources, _typed(overrides or {}, "argument "), "arguments")
    return ResolvedConfig(EngineConfig(**values), sources)


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
    _refuse_unknown(plugins, file, known=("disable",), prefix="plugins.")
    if "disable" in plugins:
        if "disable_plugins" in document:
            raise ConfigError(f"{file}: disable_plugins and plugins.disable are both given", hint="give only one")
        document["disable_plugins"] = plugins["disable"]
    return _typed(document, f"{file}: ")


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


def _typed(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    fields = option_fields(EngineConfig)
    _refuse_unknown(values, where.rstrip(": "))
    return {
        key: coerce(fields[key], value, text=False, label=f"{where}{key}", error=ConfigError) for key, value in values.items()
    }


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


def _refuse_unknown(values: Mapping[str, Any], where: str, *, known: tuple[str, ...] | None = None, prefix: str = "") -> None:
    legal = known or tuple(option_fields(EngineConfig))
    for key in values:
        if key not in legal:
            near = did_you_mean(key, legal)
            suffix = f"; did you mean {prefix + near!r}?" if near else ""
            raise ConfigError(f"{where}: unknown key {prefix + key!r}{suffix}", hint=f"valid keys: {', '.join(legal)}")
