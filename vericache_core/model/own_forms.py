"""What an adapter computes with in place of a module's own arithmetic: packed weights, fused layers. Within its steps only.

A module that has such a form gets a ``forward`` that asks for it. Outside of steps, and in steps of other adapters over
the same model, it finds none and computes as ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import nn

Forms = Mapping[nn.Module, Any]
_ACTIVE: ContextVar[Forms | None] = ContextVar("vericache_forms", default=None)


@contextmanager
def use_forms(forms: Forms) -> Iterator[None]:
    """Let modules in this context compute with ``forms``; restored on any exit."""
    token = _ACTIVE.set(forms)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def form_of(module: nn.Module) -> Any:
    """What ``module`` computes with in this context; None for its own arithmetic."""
    active = _ACTIVE.get()
    return None if active is None else active.get(module)
