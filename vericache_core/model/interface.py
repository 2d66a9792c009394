"""Our door into transformers: one attention function, registered once by name.

While a step is active in the current context, attention goes to that step; otherwise it behaves as
``sdpa``, so a model that an engine uses still answers ``model.generate`` as before. Nothing is patched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "vericache"


class StepAttention(Protocol):
    """What a step answers for each layer."""

    def attend(self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, facts: dict[str, Any]) -> Tensor:
        """``query [rows, heads, head_dim]``, ``key``/``value [rows, kv_heads, ...]`` -> ``[rows, heads, value_dim]``.

        ``facts`` are the remaining arguments of the attention interface (scaling, sliding_window, ...).
        """


_ACTIVE: ContextVar[StepAttention | None] = ContextVar("vericache_step", default=None)


@contextmanager
def active_step(step: StepAttention) -> Iterator[None]:
    """Route the attention of models that use our interface to ``step``; restored on any exit."""
    token = _ACTIVE.set(step)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def current_step() -> StepAttention | None:
    """The step that is active in this context, if any."""
    return _ACTIVE.get()


def _attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **facts: Any
) -> tuple[Tensor, None]:
    step = _ACTIVE.get()
    if step is None:
        output: tuple[Tensor, None] = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **facts)
        return output
    # [1, heads, rows, head_dim] -> [rows, heads, head_dim], and back to [1, rows, heads, value_dim]
    rows = step.attend(module, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), facts)
    return rows.unsqueeze(0), None


def _mask(*args: Any, **kwargs: Any) -> Any:
    """A step masks by itself; outside of one the mask is that of ``sdpa``."""
    return None if _ACTIVE.get() is not None else ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)
