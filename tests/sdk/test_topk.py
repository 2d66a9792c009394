from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vericache_core.topk import first_argmax, stable_topk

FEW_VALUES = st.sampled_from([0.0, -0.0, 1.0, 1.5, -2.0, math.inf, -math.inf, math.nan])
SCORES = st.lists(st.one_of(FEW_VALUES, st.floats(width=32)), min_size=1, max_size=40)


def brute_force(scores: list[float], count: int) -> list[int]:
    """Largest first, equal ones by position, NaN with the smallest."""
    plain = [-math.inf if math.isnan(score) else score for score in scores]
    return sorted(sorted(range(len(scores)), key=lambda at: (-plain[at], at))[:count])


@given(SCORES, st.integers(-1, 45))
def test_equals_brute_force(scores: list[float], count: int) -> None:
    chosen = stable_topk(torch.tensor(scores), count)
    assert chosen.dtype == torch.int64
    assert chosen.tolist() == brute_force(scores, max(count, 0))


@given(SCORES)
def test_results_are_nested(scores: list[float]) -> None:
    tensor = torch.tensor(scores)
    kept: set[int] = set()
    for count in range(1, len(scores) + 1):
        larger = set(stable_topk(tensor, count).tolist())
        assert kept < larger
        kept = larger


def test_all_equal_keeps_the_lowest_positions() -> None:
    assert stable_topk(torch.zeros(3, 5000), 7).tolist() == [list(range(7))] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_are_independent(dtype: torch.dtype) -> None:
    scores = torch.randn(5, 300, generator=torch.Generator().manual_seed(1)).to(dtype)
    together = stable_topk(scores, 100)
    for row in range(5):
        assert torch.equal(together[row], stable_topk(scores[row], 100))


@given(st.lists(st.one_of(FEW_VALUES, st.floats(width=32)), min_size=1, max_size=40))
def test_first_argmax_is_the_first_of_the_largest(logits: list[float]) -> None:
    real = [x for x in logits if not math.isnan(x)]
    if not real or max(real) == -math.inf:
        with pytest.raises(ValueError, match="no finite logit"):
            first_argmax(torch.tensor(logits))
    else:
        assert first_argmax(torch.tensor(logits)) == logits.index(max(real))


def test_first_argmax_ties_over_a_large_vocabulary() -> None:
    logits = torch.zeros(150_001, dtype=torch.bfloat16)
    logits[70_003] = logits[140_007] = 3.0
    assert first_argmax(logits) == 70_003
