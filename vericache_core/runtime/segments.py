"""Rows of one request in one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from vericache_core.runtime.request import Want

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Segment(Generic[R]):
    """``count`` leading tokens of ``want`` in rows ``first .. first + count`` of the step."""

    request: R
    want: Want
    first: int
    count: int
