from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from vericache_core.index_map import HeadMap

KeptSets = tuple[int, list[set[int]]]


@st.composite
def kept_sets(draw: st.DrawFn) -> KeptSets:
    tokens = draw(st.integers(0, 140))
    positions = st.integers(0, max(tokens - 1, 0))
    sparse = st.sets(positions, max_size=3 if tokens else 0)
    dense = sparse.map(lambda left_out: set(range(tokens)) - left_out)
    return tokens, draw(st.lists(st.one_of(sparse, dense, st.sets(positions, max_size=tokens)), min_size=1, max_size=3))


def build(kept: KeptSets) -> HeadMap:
    tokens, heads = kept
    return HeadMap([torch.tensor(sorted(head), dtype=torch.int64) for head in heads], tokens)


def sets(made: HeadMap) -> list[set[int]]:
    return [set(made.head(h).tolist()) for h in range(made.kv_heads)]


@given(kept_sets())
@example((8, [{7}, {0}]))
@example((33, [{32}]))
def test_both_forms_give_the_positions_back(kept: KeptSets) -> None:
    tokens, heads = kept
    made = build(kept)
    made.check_integrity()
    assert sets(made) == heads
    assert made.counts == tuple(map(len, heads))
    for number, head in enumerate(heads):
        assert made.head(number).tolist() == sorted(head)
        assert torch.nonzero(made.mask(number)).flatten().tolist() == sorted(head)
        assert made.dropped(number).tolist() == sorted(set(range(tokens)) - head)


@given(kept_sets())
def test_the_smaller_form_is_stored(kept: KeptSets) -> None:
    tokens, heads = kept
    made = build(kept)
    listed, masked = 4 * sum(map(len, heads)), len(heads) * ((tokens + 7) // 8)
    expected = 0 if made.complete else min(listed, masked)
    assert sum(part.nbytes for part in made.storage()) == expected
    assert set(made.named_storage()) <= {"bits", "positions"}


@given(kept_sets())
def test_storage_round_trip(kept: KeptSets) -> None:
    made = build(kept)
    again = HeadMap.from_storage(made.counts, made.tokens, made.named_storage())
    assert again == made
    assert again.named_storage().keys() == made.named_storage().keys()


@given(kept_sets(), st.integers(0, 40))
def test_grown_keeps_the_new_and_cut_undoes_it(kept: KeptSets, more: int) -> None:
    tokens, heads = kept
    grown = build(kept).grown(more)
    grown.check_integrity()
    assert grown.tokens == tokens + more
    assert sets(grown) == [head | set(range(tokens, tokens + more)) for head in heads]
    assert grown.cut(tokens) == build(kept)


@given(kept_sets(), st.data())
def test_cut_keeps_what_is_before(kept: KeptSets, data: st.DataObject) -> None:
    tokens, heads = kept
    left = data.draw(st.integers(0, tokens))
    assert sets(build(kept).cut(left)) == [{position for position in head if position < left} for head in heads]


def test_a_complete_map_takes_no_storage() -> None:
    made = HeadMap.everything(1000, 3)
    assert made.complete
    assert made.storage() == ()
    assert made.grown(5) == HeadMap.everything(1005, 3)


def test_the_bitmask_is_least_significant_bit_first() -> None:
    made = HeadMap([torch.tensor([0, 2, 8])], 9)
    assert made.packed is not None
    assert made.packed.tolist() == [[0b101, 0b1]]


@pytest.mark.parametrize("bad", [[2, 1], [1, 1], [-1, 0], [0, 9], [9]], ids=str)
def test_bad_positions_are_refused(bad: list[int]) -> None:
    with pytest.raises(ValueError, match="head 1"):
        HeadMap([torch.tensor([0, 3]), torch.tensor(bad)], 9)


@pytest.mark.parametrize("bad", [torch.tensor([0.0, 1.0]), torch.tensor([True]), torch.tensor([[0, 1]])])
def test_positions_must_be_a_row_of_integers(bad: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="1-d integer"):
        HeadMap([bad], 9)


@pytest.mark.parametrize(
    ("counts", "tokens", "storage"),
    [
        ([2], 16, {}),
        ([16], 16, {"bits": torch.full((1, 2), 255, dtype=torch.uint8)}),
        ([2], 16, {"bits": torch.tensor([[3, 0]], dtype=torch.uint8), "positions": torch.tensor([0, 1], dtype=torch.int32)}),
        ([2], 16, {"bits": torch.tensor([[7, 0]], dtype=torch.uint8)}),
        ([2], 16, {"bits": torch.tensor([[3, 0]], dtype=torch.int32)}),
        ([2], 16, {"bits": torch.tensor([[3]], dtype=torch.uint8)}),
        ([2], 12, {"bits": torch.tensor([[3, 0x80]], dtype=torch.uint8)}),
        ([2, 12], 12, {"bits": torch.tensor([[3, 0], [3, 0]], dtype=torch.uint8)}),
        ([2], 16, {"positions": torch.tensor([0, 1, 2], dtype=torch.int32)}),
        ([2], 16, {"positions": torch.tensor([1, 0], dtype=torch.int32)}),
        ([2], 16, {"positions": torch.tensor([0, 1])}),
        ([3, -1], 16, {"positions": torch.tensor([0, 1], dtype=torch.int32)}),
        ([2], 16, {"other": torch.tensor([0, 1], dtype=torch.int32)}),
    ],
    ids=str,
)
def test_storage_that_contradicts_itself_is_refused(counts: list[int], tokens: int, storage: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match=r"map|mask|position|head|storage"):
        HeadMap.from_storage(counts, tokens, storage)


def test_integrity_notices_a_changed_bit() -> None:
    made = HeadMap([torch.arange(0, 40, 2)], 40)
    assert made.packed is not None
    made.packed[0, 0] ^= 2
    with pytest.raises(ValueError, match="counts say"):
        made.check_integrity()
