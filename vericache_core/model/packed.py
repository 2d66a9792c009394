"""Linear layers with weights laid out once for the CPU, for use inside steps.

``torch.nn.functional.linear`` hands oneDNN the weights as they are stored and has them re-laid at every call, which
for the few rows of a step costs about as much as the product. Packed, a product runs in our own tiles where they are
fastest (``numba_linear.py``), else in oneDNN. Packed weights belong to an adapter, not to the model: outside of its
steps, and in steps of others, a linear layer computes as ever.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from vericache_core.model.own_forms import form_of

Product = Callable[[Tensor], Tensor]
"""``[..., in]`` -> ``[..., out]``."""
AUTO_BYTES = 2 << 30
"""``pack_weights="auto"`` packs models up to this size: a packed copy lies beside the original."""


def wants_packing(model: nn.Module, mode: str) -> bool:
    """Whether linear layers of ``model`` are packed.

    ``mode`` is ``"auto"`` (up to ``AUTO_BYTES``, by size and not by free memory: the bits of a product may depend on
    packing, so whether it happens must not change from run to run), ``"always"`` or ``"never"``.
    """
    return mode == "always" or (mode == "auto" and packed_bytes(_linears(model)) <= AUTO_BYTES)


def pack_linears(model: nn.Module, rows: int, mode: str, without: Iterable[nn.Module] = ()) -> dict[nn.Module, Product]:
    """Pack every linear layer of a CPU model; empty where that is not wanted or not possible.

    Args:
        model: its ``nn.Linear`` modules get a ``forward`` that looks for packed weights of the step it runs in.
        rows: rows of a step, a hint for the layout.
        mode: see :func:`wants_packing`.
        without: modules whose linear layers are left as they are.
    """
    if not wants_packing(model, mode):
        return {}
    left = {part for module in without for part in module.modules()}
    packs: dict[nn.Module, Product] = {}
    for module in _linears(model):
        if module in left:
            continue
        packs[module] = packed_product(module.weight.detach(), module.bias, rows)
        # A method, and not a closure: a copy of the module must not go on with the weights of the original.
        module.forward = MethodType(_forward, module)  # type: ignore[method-assign]
    return packs


def packed_product(weight: Tensor, bias: Tensor | None, rows: int) -> Product:
    """The product with ``weight [out, in]``, plus ``bias [out]``; both are copied.

    Args:
        weight: of a layer that is :func:`packable`.
        bias: or None.
        rows: rows of a step, a hint for the layout.
    """
    if importlib.util.find_spec("numba") is not None:
        from vericache_core.model.numba_linear import TiledLinear, tileable

        if tileable(weight):
            return TiledLinear(weight, bias)
    return _OneDNN(weight, bias, rows)


class _OneDNN:
    """A product in the layout and with the operators that ``torch.compile`` uses when it freezes a model."""

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: int) -> None:
        self._operators: Any = torch.ops.mkldnn
        self._bias = None if bias is None else bias.detach().clone()
        with torch.inference_mode(False), torch.no_grad():
            self._weight: Tensor = self._operators._reorder_linear_weight(weight, rows)  # noqa: SLF001

    def __call__(self, rows: Tensor) -> Tensor:
        result: Tensor = self._operators._linear_pointwise(rows, self._weight, self._bias, "none", [], "")  # noqa: SLF001
        return result


def packed_bytes(linears: Iterable[nn.Module]) -> int:
    """Bytes of the weights of some linear layers."""
    return sum(module.weight.nbytes for module in linears if isinstance(module, nn.Linear))


def _forward(module: nn.Linear, rows: Tensor) -> Tensor:
    product: Product | None = form_of(module)
    return nn.functional.linear(rows, module.weight, module.bias) if product is None else product(rows)


def _linears(model: nn.Module) -> list[nn.Linear]:
    return [module for module in model.modules() if type(module) is nn.Linear and packable(module)]


def packable(module: nn.Linear) -> bool:
    """Whether oneDNN here has packed products for the weight."""
    if module.weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    operators: Any = torch.ops.mkldnn
    if not (hasattr(operators, "_reorder_linear_weight") and hasattr(operators, "_linear_pointwise")):
        return False
    if module.weight.dtype == torch.bfloat16:
        return bool(operators._is_mkldnn_bf16_supported())  # noqa: SLF001 (torch.compile uses these operators alike)
    return module.weight.dtype == torch.float32
