"""Independent decoding loops, to compare the engine with. They share no code with the runtime.

Every step is one forward of the whole sequence through ``transformers``' own model code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

NAME = "vericache_conform"
Rows = Sequence[tuple[Tensor, Tensor]]
"""Per KV head ``(keys [kept, head_dim], values [kept, value_dim])`` that stand for the prefix."""


def greedy(model: Any, prompt: Sequence[int], count: int) -> tuple[list[int], list[Tensor]]:
    """``count`` tokens, each by one whole forward with ``eager`` attention; ties go to the lowest id. With their logits."""
    model.set_attn_implementation("eager")
    ids, rows = list(prompt), []
    with torch.no_grad():
        for _ in range(count):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float()
            rows.append(logits)
            ids.append(int((logits == logits.max()).nonzero()[0]))
    return ids[len(prompt) :], rows


def forced(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Logits ``[len(tokens), vocab]`` behind each of ``tokens``, from one whole forward in float64."""
    model.set_attn_implementation("eager")
    wide = model.double()
    try:
        with torch.no_grad():
            logits: Tensor = wide(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0]
    finally:
        model.float()
    return logits[len(prompt) - 1 : -1]


def drafted(model: Any, ids: Sequence[int], prefix: int, compressed: Mapping[int, Rows]) -> Tensor:
    """Logits ``[len(ids) - prefix, vocab]`` of the rows after the prefix when they see it through ``compressed``.

    The rows of the prefix see each other in full. Later rows see, in each compressed layer, the given rows in
    place of the prefix, and each other. Positions are the logical ones, 0, 1, 2, ...
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, scaling: float | None = None, **rest: Any
    ) -> tuple[Tensor, None]:
        factor = query.shape[-1] ** -0.5 if scaling is None else scaling
        whole = _causal(query[0], key[0], value[0], factor, rest.get("sliding_window"))
        if module.layer_idx in compressed:
            group, stored = query.shape[1] // key.shape[1], compressed[module.layer_idx]
            for head in range(query.shape[1]):
                keys, values = stored[head // group]
                own_keys = torch.cat([keys.to(key.dtype), key[0, head // group, prefix:]])
                own_values = torch.cat([values.to(value.dtype), value[0, head // group, prefix:]])
                scores = query[0, head, prefix:] @ own_keys.T * factor
                rows = torch.arange(scores.shape[0])[:, None]
                hidden = torch.arange(scores.shape[1])[None, :] > len(keys) + rows
                whole[head, prefix:] = torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ own_values
        return whole.transpose(0, 1).unsqueeze(0), None

    ALL_ATTENTION_FUNCTIONS.register(NAME, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *_, **__: None)
    model.set_attn_implementation(NAME)
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits[prefix:]


def _causal(query: Tensor, key: Tensor, value: Tensor, factor: float, window: int | None) -> Tensor:
    group = query.shape[0] // key.shape[0]
    scores = query @ key.repeat_interleave(group, 0).transpose(1, 2) * factor
    at = torch.arange(scores.shape[1])
    hidden = at[None, :] > at[:, None]
    if window is not None:
        hidden = hidden | (at[None, :] <= at[:, None] - window)
    return torch.softmax(scores.masked_fill(hidden, float("-inf")), -1) @ value.repeat_interleave(group, 0)
