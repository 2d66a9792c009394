"""What vLLM runs in each of its processes at start (``vllm.general_plugins``); runs any number of times."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from typing import Any

from vericache_vllm.compat import HOOKS, difference
from vericache_vllm.waiting import wait_passively


def register() -> None:
    """Mend vLLM's kernel dispatcher where it is broken, let ranks on the CPU sleep, and make our CPU attention known."""
    mend_dispatcher()
    wait_passively()
    offer_attention()


def offer_attention() -> None:
    """Let engines on the CPU use :class:`~vericache_vllm.attention.DraftAttentionBackend`.

    It is the stock backend until an engine's ``additional_config`` asks for a compressor. Where vLLM's CPU attention is
    not what we know, nothing is offered, and asking for it is refused by name.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or any(difference(hook) for hook in HOOKS["attention"]):
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, "vericache_vllm.attention.DraftAttentionBackend")


def mend_dispatcher() -> bool:
    """Let the dispatcher skip objects whose ``__dict__`` is no mapping; returns whether it had to be mended.

    vLLM 0.32 and 0.33 look through the attributes of all loaded modules for kernels, and take every ``__dict__`` for a
    mapping. llvmlite's library handle has another one, so an engine cannot start once numba is imported, as LMCache does.
    """
    from vllm.triton_utils import dispatcher

    if not _is_broken(dispatcher):
        return False
    # The function looks ``vars`` up in its module before the builtins.
    dispatcher.vars = _mapping_of
    return True


def _is_broken(dispatcher: Any) -> bool:
    """Ask it to rebind nothing while a module holds such an object."""
    canary = types.ModuleType("vericache_vllm._canary")
    canary.odd = _Odd()  # type: ignore[attr-defined]
    sys.modules[canary.__name__] = canary
    try:
        dispatcher._rebind_kernels([])  # noqa: SLF001 (the function that is broken)
    except AttributeError:
        return True
    finally:
        del sys.modules[canary.__name__]
    return False


class _Odd:
    """Has a ``__dict__`` that is no mapping."""

    __slots__ = ()

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        return object()


def _mapping_of(value: Any) -> Mapping[str, Any]:
    found = value.__dict__
    return found if isinstance(found, Mapping) else {}
