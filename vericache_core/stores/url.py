"""Store URLs: which backend, where, and how it is used.

``file:///folder?bytes=10GB&chunk=256&timeout=2&compressed=no``: the scheme chooses the backend; ``chunk``, ``timeout``,
``compressed`` and ``required`` mean the same for all of them; what else follows the question mark is the backend's own and
must be known to it.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

from vericache_core.errors import ConfigError
from vericache_core.sizes import parse_size
from vericache_core.stores.blobs import BlobStore

DEFAULT_CHUNK = 256
DEFAULT_TIMEOUT = 2.0
PAGE_ROWS = 128
"""Rows of a page of KV, see :mod:`vericache_core.cache.pages`, which this module does not import for torch's sake."""
_COMMON = frozenset({"chunk", "timeout", "compressed", "required"})

Opener = Callable[[SplitResult, Mapping[str, Any]], BlobStore]


@dataclass(frozen=True)
class Scheme:
    """A backend: where its opener is, imported when first asked for, and the options that it takes.

    The opener gets the split URL and the options; ``bytes`` comes as an int, others as they are written.
    """

    opener: str
    options: frozenset[str]
    attempts: int = 4
    """How often a call is tried; once where a failure does not pass by itself."""
    hint: str | None = None
    """What to do where it cannot be used the way it is set up."""
    cheap: bool = True
    """Whether opening it takes nothing that matters, so that it may be opened only to be looked at."""


_REDIS = Scheme(
    "vericache_core.stores.redis:from_url",
    frozenset({"prefix", "db", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname"}),
)

SCHEMES: dict[str, Scheme] = {
    "file": Scheme(
        "vericache_core.stores.disk:from_url",
        frozenset({"bytes", "map"}),
        attempts=1,
        hint="name a folder that this process may make, or at least read",
    ),
    "shm": Scheme(
        "vericache_core.stores.memory:from_url",
        frozenset({"bytes"}),
        attempts=1,
        hint="another name, or a file:// store where /dev/shm is not for this process",
    ),
    "redis": _REDIS,
    "rediss": _REDIS,
    "unix": _REDIS,
    "s3": Scheme("vericache_core.stores.objects:from_url", frozenset({"endpoint_url", "region", "profile", "anon"})),
    "gs": Scheme("vericache_core.stores.objects:from_url", frozenset()),
    "abfs": Scheme("vericache_core.stores.objects:from_url", frozenset()),
    "lmcache": Scheme("vericache_core.stores.lmcache:from_url", frozenset({"bytes"}), cheap=False),
    "memory": Scheme("vericache_core.stores.objects:from_url", frozenset()),
}


@dataclass(frozen=True)
class OpenedStore:
    """A backend and how to use it.

    Attributes:
        chunk: tokens a blob.
        timeout: seconds that a prefix may take.
        attempts: of a call.
        compressed: whether compressed KV goes in, beside full KV.
        required: whether a store that does not answer at start is an error, see :mod:`vericache_core.stores.start`.
    """

    blobs: BlobStore
    chunk: int
    timeout: float
    attempts: int
    compressed: bool = True
    required: bool = False


def open_store(url: str) -> OpenedStore:
    """The store that ``url`` names. Nothing is connected to or written yet.

    Raises:
        ConfigError: unknown scheme or option, or a bad value.
        MissingDependencyError: the backend needs a package that is not installed.
    """
    parts = urlsplit(url)
    scheme = SCHEMES.get(parts.scheme)
    if scheme is None:
        known = ", ".join(sorted(SCHEMES))
        raise ConfigError(f"prefix store {shown(url)!r}: unknown scheme {parts.scheme!r}", hint=f"one of {known}")
    try:
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError as error:
        raise ConfigError(f"prefix store {shown(url)!r}: options are written NAME=VALUE", cause=str(error)) from error
    options: dict[str, Any] = dict(pairs)
    unknown = sorted(options.keys() - scheme.options - _COMMON)
    if unknown or len(options) != len(pairs):
        what = f"unknown option {unknown[0]!r}" if unknown else "an option is given twice"
        known = ", ".join(sorted(scheme.options | _COMMON))
        raise ConfigError(f"prefix store {shown(url)!r}: {what}", hint=f"known: {known}")
    chunk = _chunk(options.pop("chunk", None))
    timeout = _timeout(options.pop("timeout", None))
    compressed, required = _yes(options, "compressed", True), _yes(options, "required", False)
    if "bytes" in options:
        options["bytes"] = parse_size(options["bytes"], "bytes")
    module, _, name = scheme.opener.partition(":")
    opener: Opener = getattr(importlib.import_module(module), name)
    return OpenedStore(opener(parts, options), chunk, timeout, scheme.attempts, compressed, required)


def shown(url: str) -> str:
    """``url`` as it may be shown: without a user name and a password."""
    return re.sub(r"(?<=//)[^/@?#]*@", "***@", url)


def _yes(options: dict[str, Any], name: str, default: bool) -> bool:
    """Take an option that is ``yes`` or ``no`` out of ``options``."""
    text = options.pop(name, "yes" if default else "no")
    if text not in {"yes", "no"}:
        raise ConfigError(f"{name}={text}: expected yes or no")
    return bool(text == "yes")


def _chunk(text: str | None) -> int:
    if text is None:
        return DEFAULT_CHUNK
    if not text.isdecimal() or int(text) <= 0 or int(text) % PAGE_ROWS:
        raise ConfigError(f"chunk={text}: expected a multiple of {PAGE_ROWS} tokens")
    return int(text)


def _timeout(text: str | None) -> float:
    try:
        seconds = DEFAULT_TIMEOUT if text is None else float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(f"timeout={text}: expected seconds, more than 0")
    return seconds
