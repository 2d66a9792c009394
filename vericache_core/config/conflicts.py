"""Settings that contradict each other, and settings that others leave without effect.

A contradiction is an error as soon as a configuration is built. What merely does nothing is told by the commands that
know what they will run, since a file of settings may serve several of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from vericache_core.errors import ConfigError

if TYPE_CHECKING:
    from vericache_core.config.settings import EngineConfig


@dataclass(frozen=True)
class Clash:
    """A contradiction; ``message`` may name values as ``{c.keep}``."""

    holds: Callable[[EngineConfig], bool]
    message: str
    cause: str
    hint: str


CLASHES: Final = (
    Clash(
        lambda c: c.keep is not None and c.keep_tokens is not None,
        "keep={c.keep:g} and keep_tokens={c.keep_tokens} are both given",
        "each says how much the compressor keeps",
        "give only one of them",
    ),
    Clash(
        lambda c: (c.full_kv == "remote") != (c.remote is not None),
        "full_kv=remote and remote=HOST:PORT go together",
        "one says that a store holds the full KV, the other which store",
        "give both or neither",
    ),
    Clash(
        lambda c: c.mode == "pinned" and c.full_kv == "disk",
        "mode=pinned and full_kv=disk exclude each other",
        "pinned keeps the full KV on the device",
        "mode=offloaded, or full_kv=device; a store reads no mode",
    ),
    Clash(
        lambda c: c.mode != "offloaded" and c.full_kv == "remote",
        "mode={c.mode} and full_kv=remote exclude each other",
        "the store holds the full KV, and remote_mode says who decodes",
        "leave mode out; remote_mode=local decodes here",
    ),
    Clash(
        lambda c: (c.remote_cert is None) != (c.remote_key is None),
        "remote_cert and remote_key go together",
        "a certificate is shown with the key that it belongs to",
        "give both or neither",
    ),
    Clash(
        lambda c: c.remote_cert is not None and c.remote_ca is None,
        "remote_cert is given without remote_ca",
        "without TLS no certificate is shown",
        "name the PEM file of who vouches for the store: remote_ca",
    ),
    Clash(
        lambda c: c.remote_ca is not None and c.remote_plaintext,
        "remote_ca and remote_plaintext exclude each other",
        "remote_ca turns TLS on, remote_plaintext does without",
        "give only one of them",
    ),
    Clash(
        lambda c: c.prefix_store is not None and c.identity != "bitwise",
        "prefix_store needs identity='bitwise'",
        "without that promise a stored row need not be the row that would be computed",
        "leave prefix_store out, or identity=bitwise",
    ),
)


def refuse_clashes(config: EngineConfig) -> None:
    """Raise ``ConfigError`` for the first contradiction."""
    for clash in CLASHES:
        if clash.holds(config):
            raise ConfigError(clash.message.format(c=config), cause=clash.cause, hint=clash.hint)


@dataclass(frozen=True)
class Uses:
    """What is done by ``config``: with ``fixed`` one `generate`, else whatever a file of settings may serve.

    That is an engine whose requests name compressors of their own, a store, a drafter that is told its store on the
    command line, or a calibration.
    """

    config: EngineConfig
    fixed: bool = False

    @property
    def remote(self) -> bool:
        return self.config.full_kv == "remote"

    @property
    def serves(self) -> bool:
        """Whether it may be a store or a calibration.

        Whatever ``mode`` says, a store compresses prefixes, and swaps for sessions without state, on ``full_kv`` or the
        host; a calibration measures tiers.
        """
        return not self.fixed and not self.remote

    @property
    def drafts(self) -> bool:
        """Whether any request may draft from compressed KV."""
        config = self.config
        if self.remote:
            return config.remote_mode not in {"remote", "fetch", "local"}
        return config.mode != "plain" and (config.compressor is not None or not self.fixed)

    @property
    def swaps(self) -> bool:
        """Whether full KV may rest on another tier of this machine."""
        return self.drafts and self.config.full_kv in {"host", "disk"} and self.config.mode != "pinned"

    @property
    def chooses(self) -> bool:
        """Whether anything is chosen by measured costs."""
        config = self.config
        if not self.fixed:
            return "auto" in (config.mode, config.window, config.remote_mode)
        if self.remote:
            return "auto" in (config.remote_mode, config.window)
        return (self.drafts and "auto" in (config.mode, config.window)) or (
            config.window == "auto" and config.proposer != "none"
        )


@dataclass(frozen=True)
class Idle:
    """Settings that do nothing where ``holds``; ``because`` may name values as ``{c.mode}``."""

    names: tuple[str, ...]
    holds: Callable[[Uses], bool]
    because: str


_OF_COMPRESSION: Final = ("compressor", "keep", "keep_tokens", "options", "on_compressor_error")
_OF_SWAPS: Final = ("ring_layers", "on_swap_error", "host_budget", "disk_budget")
_OF_THE_LINK: Final = (
    "remote_mode",
    "remote_token_file",
    "remote_ca",
    "remote_cert",
    "remote_key",
    "remote_plaintext",
    "remote_timeout",
    "remote_prefix_bytes",
    "on_remote_error",
)
IDLE: Final = (
    Idle(_OF_COMPRESSION, lambda u: u.config.mode == "plain" and not u.serves, "mode=plain drafts nothing"),
    Idle(("fold",), lambda u: u.config.mode == "plain", "mode=plain drafts nothing"),
    Idle(
        ("compressor", "keep", "keep_tokens", "options"),
        lambda u: u.remote and not u.drafts,
        "remote_mode={c.remote_mode} drafts nothing",
    ),
    Idle(("fold", "on_compressor_error"), lambda u: u.remote, "the store compresses, and here the tail stays exact"),
    Idle(
        ("mode", "fold", "on_compressor_error", "require_conformant", "audit_every"),
        lambda u: not u.remote and u.fixed and u.config.compressor is None,
        "no compressor is named, so nothing drafts",
    ),
    Idle(
        ("window",),
        lambda u: not u.drafts and u.config.proposer == "none",
        "nothing drafts, with neither a compressor nor a proposer at work",
    ),
    Idle(("mode",), lambda u: u.config.mode == "offloaded" and u.config.full_kv == "device", "full_kv=device offloads nothing"),
    Idle(
        ("full_kv",),
        lambda u: u.config.full_kv in {"host", "disk"} and u.config.mode in {"plain", "pinned"} and not u.serves,
        "mode={c.mode} keeps it on the device",
    ),
    Idle(
        ("full_kv",),
        lambda u: u.config.full_kv in {"host", "disk"} and u.fixed and u.config.compressor is None,
        "plain decoding, without a compressor, keeps it on the device",
    ),
    Idle(_OF_SWAPS, lambda u: not u.swaps and not u.serves, "no full KV is swapped here"),
    Idle(
        ("link_bytes_per_s",),
        # Costs that something is chosen by, and a calibration file, are of a link of this speed.
        lambda u: not u.swaps and not u.serves and not u.chooses and u.config.calibration is None,
        "no full KV is swapped here",
    ),
    Idle(("host_budget",), lambda u: u.config.full_kv == "disk", "full_kv=disk offloads to files"),
    Idle(("disk_budget",), lambda u: u.config.full_kv == "host", "full_kv=host offloads to memory"),
    Idle(
        ("swap_dir",),
        lambda u: (
            not u.serves
            and not (u.swaps and u.config.full_kv == "disk")
            and not (u.chooses and u.config.calibration is None)  # what a file costs is measured
        ),
        "there is no swap file unless full_kv=disk",
    ),
    Idle(("calibration",), lambda u: not u.chooses, "nothing is chosen by cost unless window or mode is auto"),
    Idle(("assistant",), lambda u: u.config.proposer != "assistant", "proposer={c.proposer} asks no model"),
    Idle(("tenant",), lambda u: u.config.prefix_store is None, "it is of the prefix store, and there is none"),
    Idle(_OF_THE_LINK, lambda u: u.fixed and not u.remote, "there is no link unless full_kv=remote"),
    Idle(
        ("pack_weights",),
        lambda u: u.config.pack_weights == "always" and u.config.device.startswith("cuda"),
        "weights are laid out for kernels of the CPU",
    ),
)


def without_effect(config: EngineConfig, given: Collection[str], *, fixed: bool = False) -> dict[str, str]:
    """Settings among ``given`` that do nothing, and why; in no use of ``config``, or with ``fixed`` in one `generate`."""
    uses, found = Uses(config, fixed), dict[str, str]()
    for idle in IDLE:
        if idle.holds(uses):
            for name in idle.names:
                if name in given:
                    found.setdefault(name, idle.because.format(c=config))
    return found
