"""Settings of an engine that a store makes nothing of: told where somebody gave them, and left at their defaults.

A store prefills, compresses and verifies what drafters send. It proposes nothing itself, and chooses nothing by cost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Final

from vericache_core.config import EngineConfig
from vericache_core.plugins.fields import option_fields

_DRAFTERS: Final = "a store verifies what drafters propose, however much that is"
_LINK: Final = "it is for the side that drafts"
_ALWAYS: Final = {
    "mode": "a store holds the full KV of its prefixes on the device, and that of stateless sessions on another tier",
    "window": _DRAFTERS,
    "proposer": _DRAFTERS,
    "assistant": _DRAFTERS,
    "fold": "a store compresses prefixes, and they do not grow",
    "calibration": "a store chooses nothing by cost",
    "on_compressor_error": "a prefix that cannot be compressed is refused, and its drafter goes on without",
    "remote_mode": _LINK,
    "remote_token_file": _LINK,
    "remote_ca": _LINK,
    "remote_cert": _LINK,
    "remote_key": _LINK,
    "remote_plaintext": _LINK,
    "remote_timeout": _LINK,
    "remote_prefix_bytes": _LINK,
    "on_remote_error": _LINK,
}
_SOMETIMES: Final[dict[str, tuple[Callable[[EngineConfig], bool], str]]] = {
    "tenant": (lambda c: c.prefix_store is None, "it is of the prefix store, and there is none"),
    "swap_dir": (lambda c: c.full_kv != "disk", "there is no swap file unless full_kv=disk"),
    "disk_budget": (lambda c: c.full_kv != "disk", "full KV of stateless sessions is in memory unless full_kv=disk"),
    "host_budget": (lambda c: c.full_kv == "disk", "full_kv=disk offloads to files"),
}


def idle_in_a_store(config: EngineConfig, given: Collection[str]) -> dict[str, str]:
    """Settings among ``given`` that do nothing in a store, and why."""
    found = {name: because for name, because in _ALWAYS.items() if name in given}
    found.update({name: because for name, (holds, because) in _SOMETIMES.items() if name in given and holds(config)})
    return found


def of_a_store(config: EngineConfig) -> EngineConfig:
    """``config`` without what does nothing in a store: nothing is measured or loaded for it, and no scheduler chosen by it."""
    fields = option_fields(EngineConfig)
    return dataclasses.replace(config, **{name: fields[name].default for name in _ALWAYS})
