"""What a press kept, read off a clone that it compressed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vericache_core.errors import CompressorFault


def masked_survivors(module: Any, kv_heads: int, tokens: int) -> list[Tensor] | None:
    """Per KV head what a head-wise press did not mask, ascending; ``None`` if it masked nothing. The mask is removed."""
    masked = vars(module).pop("masked_key_indices", None)
    if masked is None:
        return None
    _, heads, positions = masked
    keep = torch.ones((kv_heads, tokens), dtype=torch.bool)
    keep[heads.cpu(), positions.cpu()] = False
    return [torch.nonzero(row).flatten() for row in keep]


def matched_survivors(before: Tensor, after: Tensor) -> list[Tensor]:
    """Per KV head the positions of ``before`` ``[1, kv_heads, tokens, head_dim]`` whose key rows ``after`` holds.

    Rotary embedding makes the rows of a head distinct, so equal bytes mean the same position.

    Raises:
        CompressorFault: a row of ``after`` is none of ``before``, or two rows are alike.
    """
    found = []
    for head in range(before.shape[1]):
        places: dict[bytes, int] = {}
        for position, row in enumerate(_rows(before[0, head])):
            if places.setdefault(row, position) != position:
                raise CompressorFault("two keys of one head are alike, so survivors cannot be told apart")
        try:
            kept = [places[row] for row in _rows(after[0, head])]
        except KeyError:
            raise CompressorFault("the press changed keys, so no row of the full cache survives") from None
        found.append(torch.tensor(sorted(kept), dtype=torch.int64))
    return found


def _rows(rows: Tensor) -> list[bytes]:
    plain = rows.detach().cpu().contiguous().view(torch.uint8).numpy()
    return [row.tobytes() for row in plain]
