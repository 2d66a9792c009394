from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vericache_core.attention.online import AttentionState

HEADS, KV_HEADS, ROWS, DIM, VALUE_DIM = 4, 2, 3, 8, 6


def inputs(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(HEADS, ROWS, DIM, generator=generator)
    keys = torch.randn(KV_HEADS, tokens, DIM, generator=generator).to(dtype)
    return query, keys, torch.randn(KV_HEADS, tokens, VALUE_DIM, generator=generator).to(dtype)


def fresh() -> AttentionState:
    return AttentionState.fresh(HEADS, ROWS, VALUE_DIM)


def one_shot(query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None = None) -> Tensor:
    """Plain softmax attention in float64; ``hidden`` is ``[kv_heads, group, rows, tokens]``."""
    group = HEADS // KV_HEADS
    keys, values = keys.double().repeat_interleave(group, 0), values.double().repeat_interleave(group, 0)
    scores = query.double() @ keys.transpose(1, 2)
    if hidden is not None:
        scores = scores.masked_fill(hidden.expand(KV_HEADS, group, ROWS, -1).reshape_as(scores), -math.inf)
    return torch.softmax(scores, -1) @ values


def bits(state: AttentionState) -> list[Tensor]:
    return [part.contiguous().view(torch.int32).clone() for part in (state.top, state.total, state.acc)]


def same_bits(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@given(st.integers(1, 40), st.lists(st.integers(0, 40), max_size=5), st.integers(0, 99))
def test_blocks_equal_one_shot(tokens: int, cuts: list[int], seed: int) -> None:
    query, keys, values = inputs(tokens, seed)
    edges = sorted({0, tokens, *(cut for cut in cuts if cut < tokens)})
    state = fresh()
    for start, stop in pairwise(edges):
        state.fold(query, keys[:, start:stop], values[:, start:stop])
    torch.testing.assert_close(state.output().double(), one_shot(query, keys, values), rtol=1e-5, atol=1e-5)


@given(st.integers(1, 20), st.integers(0, 99), st.integers(1, 7))
def test_hidden_keys_count_for_nothing(tokens: int, seed: int, block: int) -> None:
    query, keys, values = inputs(tokens, seed)
    hidden = torch.rand(KV_HEADS, 1, ROWS, tokens, generator=torch.Generator().manual_seed(seed)) < 0.5
    hidden[..., 0] = False
    state = fresh()
    for start in range(0, tokens, block):
        part = slice(start, start + block)
        state.fold(query, keys[:, part], values[:, part], hidden[..., part])
    torch.testing.assert_close(state.output().double(), one_shot(query, keys, values, hidden), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e4, -1e4])
def test_poison_in_hidden_rows_changes_no_bit(poison: float, dtype: torch.dtype) -> None:
    query, keys, values = inputs(9, dtype=dtype)
    hidden = torch.zeros(KV_HEADS, 1, ROWS, 9, dtype=torch.bool)
    hidden[0, 0, :, 4:] = True  # KV head 0 sees 4 keys, KV head 1 sees 7, and row 0 one key less
    hidden[1, 0, :, 7:] = True
    hidden[:, 0, 0, 3] = True
    clean = fresh()
    clean.fold(query, keys, values, hidden)
    dirty_keys, dirty_values = keys.clone(), values.clone()
    dirty_keys[0, 4:], dirty_values[0, 4:] = poison, poison
    dirty_keys[1, 7:], dirty_values[1, 7:] = poison, poison
    dirty = fresh()
    dirty.fold(query, dirty_keys, dirty_values, hidden)
    assert same_bits(bits(clean), bits(dirty))
    assert torch.isfinite(dirty.output()).all()


def test_a_row_that_does_not_see_a_bad_value_stays_clean_beside_one_that_does() -> None:
    query, keys, values = inputs(5)
    hidden = torch.zeros(1, 1, ROWS, 5, dtype=torch.bool)
    hidden[..., 0, 4] = True
    clean = fresh()
    clean.fold(query, keys, values, hidden)
    values[:, 4, 2] = math.nan
    state = fresh()
    state.fold(query, keys, values, hidden)
    assert torch.equal(state.output()[:, 0], clean.output()[:, 0])
    assert torch.isnan(state.output()[:, 1:]).all()


@pytest.mark.parametrize("poison", [0.0, math.nan, 1e4])
@pytest.mark.parametrize("seen", [0, 5])
def test_a_fully_hidden_block_changes_no_bit(seen: int, poison: float) -> None:
    query, keys, values = inputs(seen + 4)
    state = fresh()
    state.fold(query, keys[:, :seen], values[:, :seen])
    state.acc[0, 0, 0] = -0.0  # what underflow can leave behind; -0.0 + 0.0 would be 0.0
    before = bits(state)
    hidden = torch.ones(1, 1, 1, 4, dtype=torch.bool)
    state.fold(query, keys[:, seen:] * 0 + poison, values[:, seen:] * 0 + poison, hidden)
    assert same_bits(before, bits(state))


def test_a_block_hidden_from_one_row_leaves_that_row_alone() -> None:
    query, keys, values = inputs(8)
    state = fresh()
    state.fold(query, keys[:, :4], values[:, :4])
    before = bits(state)
    hidden = torch.zeros(1, 1, ROWS, 4, dtype=torch.bool)
    hidden[:, :, 1] = True
    state.fold(query, keys[:, 4:], values[:, 4:], hidden)
    after = bits(state)
    assert all(torch.equal(a[:, 1], b[:, 1]) for a, b in zip(before, after, strict=True))
    assert not any(torch.equal(a[:, 0], b[:, 0]) for a, b in zip(before[1:], after[1:], strict=True))


def test_a_mask_that_hides_nothing_is_no_mask() -> None:
    query, keys, values = inputs(17)
    plain, masked = fresh(), fresh()
    plain.fold(query, keys, values)
    masked.fold(query, keys, values, torch.zeros(1, 1, 1, 17, dtype=torch.bool))
    assert same_bits(bits(plain), bits(masked))


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 99))
def test_merging_is_folding(here: int, there: int, seed: int) -> None:
    query, keys, values = inputs(here + there, seed)
    state, other, together = fresh(), fresh(), fresh()
    state.fold(query, keys[:, :here] * 3, values[:, :here])
    other.fold(query, keys[:, here:], values[:, here:])
    together.fold(query, torch.cat([keys[:, :here] * 3, keys[:, here:]], 1), values)
    state.merge(other)
    torch.testing.assert_close(state.output(), together.output())
    torch.testing.assert_close((state.top, state.total), (together.top, together.total))


def test_a_row_that_saw_nothing_gives_zeros() -> None:
    assert fresh().output().eq(0).all()


def test_a_visible_bad_value_is_not_hushed_up() -> None:
    query, keys, values = inputs(4)
    values[:, 2, 0] = math.nan
    state = fresh()
    state.fold(query, keys, values)
    assert torch.isnan(state.output()[..., 0]).all()


def test_large_scores_do_not_overflow() -> None:
    query, keys, values = inputs(6)
    state = fresh()
    state.fold(query * 1e4, keys * 1e3, values)
    torch.testing.assert_close(state.output().double(), one_shot(query * 1e4, keys * 1e3, values), rtol=1e-3, atol=1e-3)
