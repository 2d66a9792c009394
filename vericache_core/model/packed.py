"""Linear layers with weights laid out once for the CPU's matrix kernels (oneDNN), for use inside steps.

``torch.nn.functional.linear`` hands oneDNN the weights as they are stored and has them re-laid at every call, which
for the few rows of a step costs about as much as the product. Outside of steps a packed model computes as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vericache_core.model.interface import step_is_active

AUTO_BYTES = 2 << 30
"""``pack_weights="auto"`` packs models up to this size: a packed copy lies beside the original."""


def pack_linears(model: nn.Module, rows: int, mode: str) -> int:
    """Pack every linear layer of a CPU model; returns the bytes of the copies (0: nothing was packed).

    Args:
        model: changed in place: its ``nn.Linear`` modules get a ``forward`` of their own. Packing twice is harmless.
        rows: rows of a step, a hint for the layout.
        mode: ``"auto"`` (up to ``AUTO_BYTES``, by size and not by free memory: the bits of a product may depend on
            packing, so whether it happens must not change from run to run), ``"always"`` or ``"never"``.
    """
    linears = [module for module in model.modules() if type(module) is nn.Linear and _packable(module)]
    size = sum(module.weight.nbytes for module in linears)
    if mode == "never" or (mode == "auto" and size > AUTO_BYTES):
        for module in linears:
            module.__dict__.pop("forward", None)
        return 0
    for module in linears:
        if "forward" not in module.__dict__:
            module.forward = _packed_forward(module, rows)  # type: ignore[assignment, method-assign]
    return size


def _packable(module: nn.Linear) -> bool:
    if module.weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    operators: Any = torch.ops.mkldnn
    if not (hasattr(operators, "_reorder_linear_weight") and hasattr(operators, "_linear_pointwise")):
        return False
    if module.weight.dtype == torch.bfloat16:
        return bool(operators._is_mkldnn_bf16_supported())  # noqa: SLF001 (torch.compile uses these operators alike)
    return module.weight.dtype == torch.float32


def _packed_forward(module: nn.Linear, rows: int) -> Callable[[Tensor], Tensor]:
    operators: Any = torch.ops.mkldnn
    with torch.inference_mode(False), torch.no_grad():
        packed = operators._reorder_linear_weight(module.weight.detach(), rows)  # noqa: SLF001

    def forward(rows_in: Tensor) -> Tensor:
        if not step_is_active():
            return nn.functional.linear(rows_in, module.weight, module.bias)
        result: Tensor = operators._linear_pointwise(rows_in, packed, module.bias, "none", [], "")  # noqa: SLF001
        return result

    return forward
