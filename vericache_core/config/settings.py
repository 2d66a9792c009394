"""The settings of an engine: one frozen dataclass, whose fields are the keys of files, the environment and arguments."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vericache_core.config.conflicts import refuse_clashes
from vericache_core.errors import ConfigError
from vericache_core.plugins.fields import did_you_mean, option, option_fields
from vericache_core.plugins.options import check_options, options_to_json

_DEVICE = re.compile(r"auto|[a-z]+(:\d+)?")


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
        help="proposes many tokens to the drafter, or to the full KV where nothing drafts: "
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
    remote_prefix_bytes: int = option(
        2 << 30,
        help="most device bytes of received prefixes that no request uses, kept for later ones; less where `device_budget` is",
        unit="bytes",
        ge=0,
    )
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
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"device: expected auto, cpu, cuda or cuda:N, got {self.device!r}")
        for name in ("compressor", "swap_dir", "calibration", "prefix_store", "assistant"):
            if getattr(self, name) == "":
                raise ConfigError(f"{name}: expected text, got an empty one")
        refuse_clashes(self)

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

    def options_of(self, name: str | None) -> dict[str, Any]:
        """Options that the compressor ``name`` is built with: those given, if it is the configured one, else its defaults.

        Raises ConfigError as :meth:`compressor_options` does.
        """
        return self.compressor_options() if name == self.compressor else {}

    def to_json(self) -> dict[str, Any]:
        """Return every field as JSON types."""
        return options_to_json(self)


def replace(config: EngineConfig, **changes: Any) -> EngineConfig:
    """Return a copy with some fields changed, checked anew; an unknown field is a ConfigError."""
    refuse_unknown(changes, "replace()")
    return dataclasses.replace(config, **changes)


def refuse_unknown(values: Mapping[str, Any], where: str, *, known: tuple[str, ...] | None = None, prefix: str = "") -> None:
    """Raise ``ConfigError`` for a key that is no field (or none of ``known``), with the nearest one."""
    legal = known or tuple(option_fields(EngineConfig))
    for key in values:
        if key not in legal:
            near = did_you_mean(key, legal)
            suffix = f"; did you mean {prefix + near!r}?" if near else ""
            hint = "vericache config schema lists them" if known is None else f"valid keys: {', '.join(legal)}"
            raise ConfigError(f"{where}: unknown key {prefix + key!r}{suffix}", hint=hint)
