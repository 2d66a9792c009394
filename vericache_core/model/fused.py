"""Decoder layers in a few large operations, for steps on the CPU.

A layer of the Llama family is a dozen products and some forty small operations of torch, which for the few rows of a step
cost as much as the products. Here it is four products (queries, keys and values in one, gate and up in one) and the
kernels of ``numba_rows.py``. Like packed weights (``packed.py``) the fused form belongs to an adapter: outside of its steps
the model computes as ever. A layer is fused only if all of its parts are of the exact types that are known here, and if
the fused form then gives what the layer itself gives on random rows; else its own modules run.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vericache_core.model.interface import StepAttention, active_step, current_step
from vericache_core.model.own_forms import form_of
from vericache_core.model.packed import Product, packable, packed_bytes, packed_product

log = logging.getLogger("vericache.model")
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
HEAD_NORMS = ("q_norm", "k_norm")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.04}
"""Largest allowed difference to the layer's own output, keys, values and queries, as a share of the largest number there.
Sums in another order, and in bfloat16 now and then another rounding, which the layer's products carry on."""
CHECK_ROWS = 5


class FusedLayer:
    """One decoder layer.

    Args:
        layer: a module that :func:`recognised` accepts.
        pack: whether to lay the weights out once; the copies are this object's.
        rows: rows of a step, a hint for the layout.

    Attributes:
        packed_bytes: bytes of weights that exist a second time, packed.
        facts: what the layer tells the attention interface beside its rows, learnt by :func:`largest_difference`.
    """

    def __init__(self, layer: Any, pack: bool, rows: int) -> None:
        from vericache_core.attention.numba_panels import FORMS
        from vericache_core.model import numba_rows

        attention, mlp = layer.self_attn, layer.mlp
        self._kernels, self._attention = numba_rows, attention
        self.facts: dict[str, Any] = {}
        self._form = FORMS[layer.input_layernorm.weight.dtype]
        self.head_dim = int(attention.head_dim)
        self._heads, self._kv_heads = (part.out_features // self.head_dim for part in (attention.q_proj, attention.k_proj))
        self._inner = int(mlp.gate_proj.out_features)
        self._project = _product((attention.q_proj, attention.k_proj, attention.v_proj), pack, rows)
        self._gather = _product((attention.o_proj,), pack, rows)
        self._widen = _product((mlp.gate_proj, mlp.up_proj), pack, rows)
        self._narrow = _product((mlp.down_proj,), pack, rows)
        self._first, self._second = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self.packed_bytes = packed_bytes(layer.modules()) if pack else 0
        self._head_norms = [_Norm(getattr(attention, name)) for name in HEAD_NORMS if hasattr(attention, name)]

    def run(self, hidden: Tensor, cos: Tensor, sin: Tensor, step: StepAttention) -> Tensor:
        """``hidden [rows, width]``, cosines and sines ``[rows, head_dim]`` -> ``[rows, width]``."""
        kernels, form, (rows, width) = self._kernels, self._form, hidden.shape
        hidden, cos, sin = hidden.contiguous(), cos.contiguous(), sin.contiguous()
        normed, total = torch.empty_like(hidden), torch.empty_like(hidden)
        first, second, threads = self._first, self._second, kernels.threads_for(rows)
        kernels.norm_rows(form, rows, width, first.eps, first.address, hidden.data_ptr(), normed.data_ptr(), threads)
        seen = step.attend(self._attention, *self._queries_keys_values(self._project(normed), cos, sin, threads), self.facts)
        gathered = self._gather(seen.reshape(rows, -1))
        places = (hidden.data_ptr(), gathered.data_ptr(), total.data_ptr(), normed.data_ptr())
        kernels.add_norm_rows(form, rows, width, second.eps, second.address, *places, threads)
        wide, inner = self._widen(normed), hidden.new_empty((rows, self._inner))
        kernels.gate_rows(form, rows, self._inner, wide.data_ptr(), inner.data_ptr(), threads)
        narrow = self._narrow(inner)
        kernels.add_rows(form, rows, width, total.data_ptr(), narrow.data_ptr(), threads)
        return total

    def _queries_keys_values(self, joint: Tensor, cos: Tensor, sin: Tensor, threads: int) -> tuple[Tensor, Tensor, Tensor]:
        rows, norms = joint.shape[0], self._head_norms
        query = joint.new_empty((rows, self._heads, self.head_dim))
        key = joint.new_empty((rows, self._kv_heads, self.head_dim))
        value = torch.empty_like(key)
        self._kernels.rotate_rows(
            self._form,
            rows,
            (self._heads, self._kv_heads, self.head_dim),
            (cos.data_ptr(), sin.data_ptr()),
            (norms[0].address, norms[1].address) if norms else (0, 0),
            norms[0].eps if norms else np.float32(0),
            joint.data_ptr(),
            (query.data_ptr(), key.data_ptr(), value.data_ptr()),
            threads,
        )
        return query, key, value


class _Norm:
    """Weight and epsilon of an RMSNorm, as kernels take them."""

    def __init__(self, module: Any) -> None:
        self._weight = module.weight.detach().contiguous()  # kept, because kernels know its address only
        self.address, self.eps = self._weight.data_ptr(), np.float32(module.variance_epsilon)


def _product(linears: tuple[Any, ...], pack: bool, rows: int) -> Product:
    """``[rows, in]`` -> the outputs of ``linears`` side by side; packed as one product, or one by one as they are."""
    if not pack or not all(packable(part) for part in linears):
        return lambda x: torch.cat([nn.functional.linear(x, part.weight, part.bias) for part in linears], -1)
    weight = torch.cat([part.weight.detach() for part in linears])
    biases = [part.weight.new_zeros(part.out_features) if part.bias is None else part.bias.detach() for part in linears]
    bias = None if all(part.bias is None for part in linears) else torch.cat(biases)
    return packed_product(weight, bias, rows)


def recognised(layer: Any) -> bool:
    """Whether every part of ``layer`` is of a type whose arithmetic is known here, and not changed by anybody."""
    family = next((name for name in FAMILIES if _is_own(layer, name, "DecoderLayer")), None)
    if family is None:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    linears = [*(getattr(attention, f"{name}_proj", None) for name in "qkvo")]
    linears += [getattr(mlp, f"{name}_proj", None) for name in ("gate", "up", "down")]
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    heads: list[Any] = [getattr(attention, name, None) for name in HEAD_NORMS]
    if family == "Qwen3":
        norms += heads
    elif any(part is not None for part in heads):
        return False
    known = _is_own(attention, family, "Attention") and _is_own(mlp, family, "MLP")
    known &= all(type(part) is nn.Linear for part in linears) and all(_is_own(part, family, "RMSNorm") for part in norms)
    known &= type(getattr(mlp, "act_fn", None)).__name__ in {"SiLU", "SiLUActivation"}
    return known and not any(_is_changed(part) for part in layer.modules()) and len({p.dtype for p in layer.parameters()}) == 1


def fuse_layers(model: nn.Module, rows: int, mode: str, pack: bool) -> dict[nn.Module, FusedLayer]:
    """The fused form of every layer that is recognised; empty where one of them differs, without Numba, and off the CPU.

    Args:
        model: its fused layers get a ``forward`` that looks for the fused form of the step it runs in.
        rows: rows of a step, a hint for the layout of weights.
        mode: ``"auto"`` or ``"never"``.
        pack: whether linear layers are packed.
    """
    first = next(model.parameters())
    if mode == "never" or first.device.type != "cpu" or first.dtype not in TOLERANCE:
        return {}
    layers: list[Any] = [module for module in model.modules() if recognised(module)]
    if not layers or importlib.util.find_spec("numba") is None:
        return {}
    fused: dict[Any, FusedLayer] = {}
    for layer in layers:
        fused[layer] = FusedLayer(layer, pack, rows)
        difference = largest_difference(layer, fused[layer])
        if not difference <= TOLERANCE[first.dtype]:
            where = layer.self_attn.layer_idx
            log.warning("decoder layers run as they are: the fused form of layer %s differs by %.2g", where, difference)
            return {}
    for layer in fused:
        layer.forward = MethodType(_forward, layer)
    return fused


def largest_difference(layer: Any, form: FusedLayer) -> float:
    """Between the layer and its fused form on random rows: of output, queries, keys and values, relative to the largest.

    Attention is the same random answer for both.
    """
    draw, weight = torch.Generator().manual_seed(2), layer.input_layernorm.weight
    hidden = (torch.randn((CHECK_ROWS, weight.shape[0]), generator=draw) / 4).to(weight.dtype)
    turns = torch.rand((CHECK_ROWS, form.head_dim // 2), generator=draw) * 6
    cos, sin = (torch.cat((part, part), -1).to(weight.dtype) for part in (turns.cos(), turns.sin()))
    mine, theirs = _Answer(), _Answer()
    with torch.inference_mode(), active_step(theirs):
        own = layer(hidden.unsqueeze(0), attention_mask=None, position_embeddings=(cos.unsqueeze(0), sin.unsqueeze(0)))[0]
    form.facts = theirs.facts
    with torch.inference_mode():
        fused = form.run(hidden, cos, sin, mine)
    pairs = zip((own, *theirs.seen), (fused, *mine.seen), strict=True)
    shares = [(one.float() - other.float()).abs().max() / one.float().abs().max().clamp_min(1e-9) for one, other in pairs]
    largest = float(torch.stack(shares).max())
    return largest if math.isfinite(largest) else math.inf


class _Answer:
    """A step that keeps what it is called with and answers the same random rows every time."""

    def __init__(self) -> None:
        self.seen: tuple[Tensor, ...] = ()
        self.facts: dict[str, Any] = {}

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, facts: dict[str, Any]) -> Tensor:
        self.seen, self.facts = (query, key, value), facts
        draw = torch.Generator().manual_seed(3)
        return torch.randn((*query.shape[:2], value.shape[2]), generator=draw).to(query.dtype)


def _forward(layer: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    form, step, angles = form_of(layer), current_step(), kwargs.get("position_embeddings")
    if form is None or step is None or angles is None:
        return type(layer).forward(layer, hidden_states, *args, **kwargs)
    return form.run(hidden_states[0], angles[0][0], angles[1][0], step).unsqueeze(0)


def _is_own(module: Any, family: str, part: str) -> bool:
    """Whether ``module`` is exactly that class of transformers."""
    kind = type(module)
    name = family.lower()
    return kind.__name__ == family + part and kind.__module__ == f"transformers.models.{name}.modeling_{name}"


def _is_changed(module: nn.Module) -> bool:
    """Whether somebody else hooked into ``module`` or replaced its forward."""
    forward = module.__dict__.get("forward")
    ours = forward is None or getattr(forward, "__module__", "").startswith("vericache_core.model.")
    return bool(module._forward_hooks or module._forward_pre_hooks) or not ours  # noqa: SLF001 (there is no public way to ask)
