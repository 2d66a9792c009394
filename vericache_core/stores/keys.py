"""Keys of blobs as every backend accepts them."""

from __future__ import annotations

import re
from typing import Final

from vericache_core.errors import UsageError

KEY: Final = re.compile(r"[a-z0-9-]{1,128}")

PROBE: Final = "is-anybody-there"
"""Looked up to see whether a store answers; nothing is ever put there."""


def check_key(key: str) -> str:
    """``key`` itself, when it is one.

    Raises:
        UsageError: it holds anything but lowercase letters, digits and hyphens, or has no fitting length.
    """
    if not KEY.fullmatch(key):
        raise UsageError(f"{key[:140]!r} is no key of a blob", hint="[a-z0-9-]{1,128}")
    return key
