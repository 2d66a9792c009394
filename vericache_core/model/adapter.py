"""A Hugging Face causal LM as a function of packed rows: ``[rows]`` token ids and positions -> logits.

No Hugging Face cache object takes part: KV rows come in and go out through the attention interface.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vericache_core.errors import UnsupportedModelError
from vericache_core.kv import LayerDescriptor
from vericache_core.model import interface
from vericache_core.model.fused import FusedLayer, fuse_layers
from vericache_core.model.graphs import StepGraphs
from vericache_core.model.interface import StepAttention, active_step
from vericache_core.model.own_forms import Forms, use_forms
from vericache_core.model.packed import pack_linears, packed_bytes, wants_packing
from vericache_core.model.refusals import refuse_by_config, refuse_by_facts, rope_settings


class ModelAdapter:
    """Runs ``model`` in steps of exactly ``rows`` rows, or of another of its ``shapes``.

    Args:
        model: a ``transformers`` causal LM; switched to evaluation mode and to our attention interface
            (which acts as ``sdpa`` outside of steps).
        rows: query rows of a step.
        pack_weights: see :func:`vericache_core.model.packed.wants_packing`.
        fuse: see :func:`vericache_core.model.fused.fuse_layers`.

    Attributes:
        shapes: row counts that a step may have, ascending; only ``rows`` until admission has proved that others
            give every row the same bits.
        graphs: captured steps; None where steps run as they are (:func:`vericache_core.model.graphs.capture_steps`).
        graphs_refused: why capturing failed, if it did.

    Raises:
        UnsupportedModelError: naming what cannot be run exactly.
    """

    def __init__(self, model: Any, rows: int, pack_weights: str = "auto", fuse: str = "auto") -> None:
        self.model, self.rows = model.eval(), rows
        self.shapes: tuple[int, ...] = (rows,)
        self.graphs: StepGraphs | None = None
        self.graphs_refused: str | None = None
        self.config = model.config.get_text_config()
        self.name = str(getattr(self.config, "model_type", type(model).__name__))
        refuse_by_config(self.config)
        self.device = next(model.parameters()).device
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self._forward_names = set(inspect.signature(model.forward).parameters)
        model.set_attn_implementation(interface.NAME)
        # What a layer says of its attention it says itself, so it is asked before anything is packed or fused.
        self._forms: Forms = {}
        self.layers = self._discover()
        fused = fuse_layers(model, rows, fuse, wants_packing(model, pack_weights))
        self._fused: list[FusedLayer] = list(fused.values())
        self._forms = {**fused, **pack_linears(model, rows, pack_weights, without=fused)}
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.max_positions = _max_positions(self.config)

    @property
    def packed_bytes(self) -> int:
        """Bytes of linear weights that exist a second time, packed; 0 if none are."""
        return packed_bytes(self._forms) + sum(form.packed_bytes for form in self._fused)

    @property
    def fused_layers(self) -> int:
        """Layers that run in their fused form."""
        return len(self._fused)

    @property
    def most_rows(self) -> int:
        """Rows of the largest step."""
        return self.shapes[-1]

    def step(
        self,
        token_ids: Sequence[int],
        positions: Sequence[int],
        attention: StepAttention,
        logits: bool = True,
        *,
        graphs: bool = True,
    ) -> Tensor:
        """One forward in the smallest shape that holds the rows; the rest is padded with token 0 at position 0.

        Args:
            token_ids: at most ``most_rows`` ids.
            positions: logical position of each.
            attention: stores and attends for each layer.
            logits: False skips the output head where the model allows (the rows then mean nothing).
            graphs: False leaves captured graphs, whose buffers serve one step at a time, to the steps that come meanwhile.

        Returns:
            ``[shape, vocab]`` in the model's dtype; only the first ``len(token_ids)`` rows mean anything.
        """
        shape = next((shape for shape in self.shapes if shape >= len(token_ids)), None)
        if shape is None:
            raise ValueError(f"{len(token_ids)} rows do not fit in a step of {self.most_rows}")
        pad = shape - len(token_ids)
        ids, places = [*token_ids, *[0] * pad], [*positions, *[0] * pad]
        with torch.inference_mode():
            output = self.graphs.run(ids, places, attention, logits) if graphs and self.graphs is not None else None
            if output is None:
                given, at = (torch.tensor([numbers], device=self.device) for numbers in (ids, places))
                with active_step(attention):
                    output = self.forward(given, at, logits=logits)
        return output

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None = None, logits: bool = True) -> Tensor:
        """The model's own forward of ``ids`` and ``positions [1, rows]`` -> ``[rows, vocab]``; see :meth:`step`."""
        arguments: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "use_cache": False}
        if mask is not None:
            arguments["attention_mask"] = mask
        if not logits and "logits_to_keep" in self._forward_names:
            arguments["logits_to_keep"] = 1
        with use_forms(self._forms):
            output: Tensor = self.model(**arguments).logits[0]
        return output

    def _discover(self) -> tuple[LayerDescriptor, ...]:
        """Run one step that only looks, and describe each attention layer from what it was called with."""
        look = _Look()
        look.dtype = self.dtype
        self.step([0], [0], look)
        expected = int(self.config.num_hidden_layers)
        if sorted(look.seen) != list(range(expected)):
            raise UnsupportedModelError(
                f"{self.name}: {len(look.seen)} of {expected} layers go through the attention interface once each",
                cause="recurrent layers, shared KV, or a model class with attention code of its own",
            )
        layers = []
        for index in range(expected):
            query, key, value, facts, causal = look.seen[index]
            refuse_by_facts(self.name, index, facts)
            if not causal:
                raise UnsupportedModelError(f"{self.name}: layer {index} is not causal")
            window = facts.get("sliding_window")
            kind: Literal["full", "sliding"] = "full" if window is None else "sliding"
            theta, rotary = _rotary(self.config, index, key.shape[2])
            scaling = facts.get("scaling")
            layers.append(
                LayerDescriptor(
                    index=index,
                    kind=kind,
                    heads=query.shape[1],
                    kv_heads=key.shape[1],
                    head_dim=key.shape[2],
                    value_dim=value.shape[2],
                    dtype=key.dtype,
                    scaling=float(key.shape[2] ** -0.5 if scaling is None else scaling),
                    sliding_window=window,
                    rope_theta=theta,
                    rotary_dim=rotary,
                )
            )
        return tuple(layers)


class _Look:
    """A step that records what each layer's attention is called with and answers zeros."""

    dtype: torch.dtype

    def __init__(self) -> None:
        self.seen: dict[int, tuple[Tensor, Tensor, Tensor, dict[str, Any], bool]] = {}

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, facts: dict[str, Any]) -> Tensor:
        index = layer_index(module)
        if index in self.seen:
            raise UnsupportedModelError(f"layer {index} attends more than once in a forward")
        self.seen[index] = (query, key, value, facts, bool(getattr(module, "is_causal", True)))
        return query.new_zeros((query.shape[0], query.shape[1], value.shape[2]))


def layer_index(module: nn.Module) -> int:
    """Position of an attention module in its model.

    Raises:
        UnsupportedModelError: the module does not say.
    """
    index = getattr(module, "layer_idx", None)
    if not isinstance(index, int):
        raise UnsupportedModelError(f"{type(module).__name__} carries no layer index")
    return index


def _max_positions(config: Any) -> int | None:
    for field in ("max_position_embeddings", "n_positions"):
        value = getattr(config, field, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _rotary(config: Any, layer: int, head_dim: int) -> tuple[float | None, int]:
    """``(base, rotated channels)`` of a layer; ``(None, 0)`` without rotary embedding."""
    block = getattr(config, "rope_parameters", None)
    kinds = getattr(config, "layer_types", None)
    if isinstance(block, dict) and kinds and isinstance(block.get(kinds[layer]), dict):
        settings: dict[str, Any] = block[kinds[layer]]
    else:
        settings = dict(next(rope_settings(config), {}))
    theta = settings.get("rope_theta", getattr(config, "rope_theta", None))
    if theta is None:
        return None, 0
    factor = settings.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None) or 1.0)
    return float(theta), int(head_dim * float(factor))
