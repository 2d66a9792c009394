"""Bytes as people read and write them. Decimal units throughout, 1 MB is a million bytes, but for MiB and the like."""

from __future__ import annotations

import math
import re
from typing import Final

from vericache_core.errors import ConfigError

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)
_UNITS: Final = ("kB", "MB", "GB", "TB", "PB", "EB")


def size(count: float) -> str:
    """``11.8 MB``, for tables and lines of figures."""
    if round(count) < 1000:
        return f"{round(count)} B"
    power = next((power for power in range(1, len(_UNITS)) if round(count / 1000**power, 1) < 1000), len(_UNITS))
    return f"{count / 1000**power:.1f} {_UNITS[power - 1]}"


def exact_size(count: float) -> str:
    """``11.8 MB (11,770,000 bytes)``, for messages: what to compare with a setting, which is in bytes."""
    whole = round(count)
    exact = f"{whole:,} byte{'' if whole == 1 else 's'}"
    return exact if whole < 1000 else f"{size(whole)} ({exact})"


def is_size(text: str) -> bool:
    """Whether ``text`` is a number with a unit of bytes behind it."""
    return _SIZE.fullmatch(text.strip()) is not None and text.strip()[-1].isalpha()


def parse_size(text: str, name: str) -> int:
    """``10GB``, ``512MiB`` or ``1000000`` as bytes, rounded up.

    Raises:
        ConfigError: it is none, or 0; the message begins with ``name=``.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or not float(match[1]) > 0:
        raise ConfigError(f"{name}={text}: expected a size such as 10GB or 512MiB")
    prefix = (match[2] or "").lower()
    unit: int = (1024 if prefix.endswith("i") else 1000) ** " kmgt".index(prefix[:1] or " ")
    return math.ceil(float(match[1]) * unit)
