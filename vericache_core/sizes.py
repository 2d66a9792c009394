"""Bytes as people read them. Decimal units throughout: 1 MB is a million bytes."""

from __future__ import annotations

from typing import Final

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
