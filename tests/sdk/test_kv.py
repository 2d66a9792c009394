from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.sdk.making import NormDropper, RoundQuantizer, cache, descriptor, view
from vericache_core.attention.online import AttentionState
from vericache_core.context import CompressContext
from vericache_core.index_map import HeadMap
from vericache_core.kv import CompressedKV, PlainLayer, storage_bytes
from vericache_core.plugins.options import Budget

LAYER = descriptor()


def ragged(keys: torch.Tensor, values: torch.Tensor, heads: list[list[int]]) -> PlainLayer:
    return PlainLayer.gather(keys, values, HeadMap([torch.tensor(head) for head in heads], keys.shape[1]))


def attended(layer: PlainLayer, query: torch.Tensor) -> torch.Tensor:
    state = AttentionState.fresh(query.shape[0], query.shape[1], layer.flat_values.shape[1])
    layer.attend(query, state)
    return state.output()


@pytest.mark.parametrize("heads", [[[0, 3, 9], [1, 2, 8]], [[0], [1, 2, 8, 9]]], ids=["equal counts", "ragged"])
def test_attending_to_survivors_is_hiding_the_others(heads: list[list[int]]) -> None:
    (keys,), (values,) = cache([LAYER], 10)
    query = torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(5))
    hidden = torch.ones(2, 1, 1, 10, dtype=torch.bool)
    for number, head in enumerate(heads):
        hidden[number, ..., head] = False
    full = AttentionState.fresh(4, 3, 16)
    full.fold(query, keys, values, hidden)
    torch.testing.assert_close(attended(ragged(keys, values, heads), query), full.output())


def test_gathered_rows_are_exact_copies() -> None:
    (keys,), (values,) = cache([LAYER], 10)
    layer = ragged(keys, values, [[0, 9], [3, 4, 5]])
    assert torch.equal(layer.head(1)[0], keys[1, 3:6])
    assert torch.equal(layer.head(0)[1], values[0, [0, 9]])
    keys.zero_()
    assert layer.flat_keys.abs().sum() > 0


def test_bytes_count_storages_not_views() -> None:
    big = torch.zeros(1000, 4)
    assert storage_bytes([big[:10]]) == big.nbytes
    assert storage_bytes([big[:10], big[10:20], big]) == big.nbytes
    assert storage_bytes([big[:10].clone()]) == 160
    assert storage_bytes([torch.zeros(0, 4)]) == 0


def test_nbytes_counts_the_map_and_shared_storage_once() -> None:
    (keys,), (values,) = cache([LAYER], 64)
    layer = ragged(keys, values, [list(range(0, 64, 2)), list(range(20))])
    rows = (32 + 20) * (16 + 16) * 4
    assert layer.nbytes == rows + 2 * 8
    twice = CompressedKV("x", {}, 64, (LAYER, descriptor(1)), (layer, layer))
    assert twice.nbytes == layer.nbytes
    held = PlainLayer(torch.zeros(500, 16)[:52], layer.flat_values, layer.surviving)
    assert held.nbytes == 500 * 64 + 52 * 64 + 2 * 8


@given(st.sets(st.integers(0, 19), min_size=1), st.sets(st.integers(0, 19), min_size=1))
def test_residual_and_survivors_rebuild_the_full_rows(first: set[int], second: set[int]) -> None:
    (keys,), (values,) = cache([LAYER], 20)
    layer = ragged(keys, values, [sorted(first), sorted(second)])
    missing = CompressedKV("x", {}, 20, (LAYER,), (layer,)).residual(0)
    assert missing is not None
    for number in range(2):
        rebuilt = torch.full((20, 16), torch.nan)
        rebuilt[layer.surviving.head(number)] = layer.head(number)[0]
        rebuilt[missing[number]] = keys[number, missing[number]]
        assert torch.equal(rebuilt, keys[number])


def test_codes_have_no_residual() -> None:
    made = RoundQuantizer().compress(view([LAYER], cache([LAYER], 20), 0, 20), CompressContext())
    assert made.residual(0) is None


def test_prefix_reads_are_private() -> None:
    kv = cache([LAYER], 6)
    prefix = view([LAYER], kv, 0, 6)
    prefix.keys(0).zero_()
    prefix.rows(0)[1].zero_()
    assert kv[0][0].abs().min() > 0
    assert kv[1][0].abs().min() > 0
    assert prefix.nbytes() == kv[0][0].nbytes + kv[1][0].nbytes
    assert view([LAYER], kv, 2, 5).positions.tolist() == [2, 3, 4]


def test_integrity_of_the_whole() -> None:
    made = NormDropper(Budget(keep=0.5)).compress(view([LAYER], cache([LAYER], 20), 0, 20), CompressContext())
    made.check_integrity()
    with pytest.raises(ValueError, match="stands for"):
        CompressedKV("x", {}, 21, made.descriptors, made.layers).check_integrity()
    (keys,), (values,) = cache([LAYER], 5)
    empty = PlainLayer.gather(keys, values, HeadMap([torch.tensor([1]), torch.tensor([], dtype=torch.int64)], 5))
    with pytest.raises(ValueError, match="keeps nothing"):
        CompressedKV("x", {}, 5, (LAYER,), (empty,)).check_integrity()


def test_rows_and_positions_must_agree() -> None:
    with pytest.raises(ValueError, match="positions survive"):
        PlainLayer(torch.zeros(3, 4), torch.zeros(2, 4), HeadMap.everything(3, 1))


def test_descriptor_arithmetic() -> None:
    layer = descriptor(heads=6, kv_heads=2, head_dim=16, value_dim=8, dtype=torch.bfloat16)
    assert layer.group == 3
    assert layer.token_bytes == 2 * 24 * 2
