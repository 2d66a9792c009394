"""Linear layers with weights laid out once for the CPU's matrix kernels (oneDNN), for use inside steps.

``torch.nn.functional.linear`` hands oneDNN the weights as they are stored and has them re-laid at every call, which
for the few rows of a step costs about as much as the product. Packed weights belong to an adapter, not to the model:
outside of its steps, and in steps of others, a linear layer computes as ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

AUTO_BYTES = 2 << 30
"""``pack_weights="auto"`` packs models up to this size: a packed copy lies beside the original."""

Packs = Mapping[nn.Module, Tensor]
_ACTIVE: ContextVar[Packs | None] = ContextVar("vericache_packs", default=None)


def pack_linears(model: nn.Module, rows: int, mode: str) -> dict[nn.Module, Tensor]:
    """Pack every linear layer of a CPU model; empty where that is not wanted or not possible.

    Args:
        model: its ``nn.Linear`` modules get a ``forward`` that looks for packed weights of the step it runs in.
        rows: rows of a step, a hint for the layout.
        mode: ``"auto"`` (up to ``AUTO_BYTES``, by size and not by free memory: the bits of a product may depend on
            packing, so whether it happens must not change from run to run), ``"always"`` or ``"never"``.
    """
    linears = [module for module in model.modules() if type(module) is nn.Linear and _packable(module)]
    if mode == "never" or (mode == "auto" and packed_bytes(linears) > AUTO_BYTES):
        return {}
    operators: Any = torch.ops.mkldnn
    packs: dict[nn.Module, Tensor] = {}
    for module in linears:
        with torch.inference_mode(False), torch.no_grad():
            packs[module] = operators._reorder_linear_weight(module.weight.detach(), rows)  # noqa: SLF001
        # A method, and not a closure: a copy of the module must not go on with the weights of the original.
        module.forward = MethodType(_forward, module)  # type: ignore[method-assign]
    return packs


def packed_bytes(linears: Iterable[nn.Module]) -> int:
    """Bytes of the weights of some linear layers."""
    return sum(module.weight.nbytes for module in linears if isinstance(module, nn.Linear))


@contextmanager
def use_packs(packs: Packs) -> Iterator[None]:
    """Let linear layers in this context use ``packs``."""
    token = _ACTIVE.set(packs)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def _forward(module: nn.Linear, rows: Tensor) -> Tensor:
    packs = _ACTIVE.get()
    packed = None if packs is None else packs.get(module)
    if packed is None:
        return nn.functional.linear(rows, module.weight, module.bias)
    operators: Any = torch.ops.mkldnn
    result: Tensor = operators._linear_pointwise(rows, packed, module.bias, "none", [], "")  # noqa: SLF001
    return result


def _packable(module: nn.Linear) -> bool:
    if module.weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    operators: Any = torch.ops.mkldnn
    if not (hasattr(operators, "_reorder_linear_weight") and hasattr(operators, "_linear_pointwise")):
        return False
    if module.weight.dtype == torch.bfloat16:
        return bool(operators._is_mkldnn_bf16_supported())  # noqa: SLF001 (torch.compile uses these operators alike)
    return module.weight.dtype == torch.float32
