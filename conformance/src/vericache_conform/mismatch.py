"""Two outputs side by side: equal, or a report of the first difference that says where, by how much and of what kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from vericache_conform.outcome import Failure
from vericache_conform.stored import tensor_bytes

NEAR: Final = 1e-3
"""A top-2 margin below this share of the largest logit counts as a near tie."""


def require_same(expected: Any, got: Any, what: str) -> None:
    """Raise ``Failure`` unless tokens, finish reasons and recorded logits of two request outputs agree bit for bit."""
    if got.error is not None:
        raise Failure(f"{what}: the request failed: {got.error}")
    if got.metrics.degraded:
        raise Failure(f"{what}: the compressor was given up: {got.metrics.degraded[0]}")
    different = first_difference(expected.token_ids, got.token_ids)
    if different is not None:
        facts = {"mismatch": explain(expected, got, different)}
        raise Failure(f"{what}: tokens differ from those of the full cache, first at index {different}", facts=facts)
    if (expected.finish_reason, expected.stop_reason) != (got.finish_reason, got.stop_reason):
        raise Failure(f"{what}: it ended with {got.finish_reason!r}, the full cache with {expected.finish_reason!r}")
    if expected.logits is not None and got.logits is not None and tensor_bytes(expected.logits) != tensor_bytes(got.logits):
        rows = [i for i in range(len(expected.logits)) if not torch.equal(expected.logits[i], got.logits[i])]
        index = rows[0] if rows else 0
        facts = {"mismatch": {**explain(expected, got, index), "rows_that_differ": len(rows)}}
        raise Failure(f"{what}: tokens agree, but the logits behind index {index} differ in their bits", facts=facts)


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Index of the first token that differs (or that one has and the other has not), or None."""
    for index, (one, other) in enumerate(zip(expected, got, strict=False)):
        if one != other:
            return index
    return None if len(expected) == len(got) else min(len(expected), len(got))


def explain(expected: Any, got: Any, index: int) -> dict[str, Any]:
    """Facts about one position: both tokens, their logits, the margin, and whether it was a near tie."""
    one = expected.token_ids[index] if index < len(expected.token_ids) else None
    other = got.token_ids[index] if index < len(got.token_ids) else None
    facts: dict[str, Any] = {
        "token_index": index,
        "position": len(expected.prompt_token_ids) + index,
        "expected_token": one,
        "got_token": other,
        "expected_length": len(expected.token_ids),
        "got_length": len(got.token_ids),
    }
    if expected.logits is not None and index < len(expected.logits):
        row = expected.logits[index].float()
        facts |= margin_facts(row, one, other)
    return facts


def margin_facts(row: Tensor, expected: int | None, got: int | None) -> dict[str, Any]:
    """Logits of two tokens in one row, their margin, and its class."""
    top = torch.topk(row, 2).values
    margin = float(top[0] - top[1])
    scale = float(row.abs().max()) or 1.0
    return {
        "expected_logit": None if expected is None else float(row[expected]),
        "got_logit": None if got is None else float(row[got]),
        "top2_margin": margin,
        "class": "near-tie" if margin <= NEAR * scale else "structural",
    }
