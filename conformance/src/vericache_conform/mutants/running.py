"""Faults that show when a model runs."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from vericache_conform.mutants.healthy import Drop, DropOptions, Quant, spec
from vericache_core.attention.online import AttentionState
from vericache_core.coded import CodedLayer, CodedRows
from vericache_core.context import CompressContext
from vericache_core.index_map import HeadMap
from vericache_core.kv import CompressedKV, PrefixView


class HooksModel(Drop):
    """While a request that it compressed lives, every linear layer of the process computes a little more."""

    name = "hooks-model"

    def compress(self, prefix: PrefixView, context: CompressContext) -> CompressedKV:
        made = super().compress(prefix, context)
        handle = torch.nn.modules.module.register_module_forward_hook(_more)
        weakref.finalize(self, handle.remove)
        return made


def _more(module: Any, arguments: Any, output: Any) -> Any:
    return output * 1.05 if isinstance(module, torch.nn.Linear) and isinstance(output, Tensor) else None


class _Decoy(CodedLayer):
    """Lists its rows, and attends to a copy that it does not list."""

    def __init__(self, keys: CodedRows, values: CodedRows, surviving: HeadMap) -> None:
        super().__init__(keys, values, surviving)
        self.hidden = [(key.clone(), value.clone()) for key, value in self.blocks()]

    def attend(self, query: Tensor, state: AttentionState) -> None:
        for keys, values in self.hidden:
            state.fold(query, keys, values)


class Decoy(Quant):
    name = "decoy"
    layer_type = _Decoy


class Disappoints(Drop):
    """Keeps the least important tokens, and declares an acceptance that this cannot reach."""

    name = "disappoints"

    def __init__(self, options: DropOptions | None = None) -> None:
        super().__init__(options or DropOptions(keep_tokens=9))


class RaisesInExtend(Quant):
    name = "raises-in-extend"

    def extend(self, compressed: CompressedKV, rows: PrefixView, context: CompressContext) -> CompressedKV:
        if len(rows.layers) > 2:
            raise RuntimeError("too many layers")
        return super().extend(compressed, rows, context)


HOOKS_MODEL = spec(HooksModel)
DECOY = spec(Decoy)
DISAPPOINTS = spec(Disappoints)
RAISES_IN_EXTEND = spec(RaisesInExtend)
