"""Paged rows against lists of rows: append, roll back, release, read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from tests.sdk.making import descriptor
from tests.watch import same_bits
from vericache_core.cache.move import copy_rows_reference
from vericache_core.cache.move_numba import copy_heads_numba, copy_rows_numba
from vericache_core.cache.pages import PAGE, PagedRows, pages_for

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def bit_noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Every bit pattern may occur: NaN payloads, infinities, -0.0, subnormals."""
    words = torch.int32 if dtype == torch.float32 else torch.int16
    info, draw = torch.iinfo(words), torch.Generator().manual_seed(seed)
    return torch.randint(info.min, info.max, shape, generator=draw, dtype=words).view(dtype)


class PagedMachine(RuleBasedStateMachine):
    """`PagedRows` beside two Python lists, one per KV head."""

    window: int | None = None

    @initialize(ragged=st.integers(0, 200), dtype=st.sampled_from(DTYPES))
    def start(self, ragged: int, dtype: torch.dtype) -> None:
        self.layer = descriptor(head_dim=4, value_dim=6, dtype=dtype, window=self.window)
        self.pages, self.seed, self.low = PagedRows(self.layer, CPU), 0, 0
        self.model: list[list[tuple[Tensor, Tensor]]] = [[], []]
        if self.window is None and ragged:  # a token dropper that keeps more in the second head
            keys, values = bit_noise((ragged, 4), dtype, 1), bit_noise((ragged, 6), dtype, 2)
            self.pages.reserve(ragged)
            self.pages.put_head(1, keys, values)
            self.pages.lengths = np.array([0, ragged], dtype=np.int64)
            self.model[1] = list(zip(keys, values, strict=True))

    @rule(count=st.integers(0, 150))
    def append(self, count: int) -> None:
        self.seed += 10
        keys = bit_noise((2, count, 4), self.layer.dtype, self.seed)
        values = bit_noise((2, count, 6), self.layer.dtype, self.seed + 1)
        self.pages.append(keys, values)
        for head in range(2):
            self.model[head] += zip(keys[head], values[head], strict=True)

    @rule(count=st.integers(1, 150))
    def write_scratch(self, count: int) -> None:
        """Drafted rows beyond the end count for nothing."""
        self.pages.write(
            self.pages.lengths,
            torch.full((2, count, 4), float("nan"), dtype=self.layer.dtype),
            torch.full((2, count, 6), 1e4, dtype=self.layer.dtype),
        )

    @rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        shortest = min(map(len, self.model))
        count = data.draw(st.integers(0, shortest))
        allowed = self.window is None or not self.low or shortest - count - self.window + 1 >= self.low
        if not allowed:
            before = self.pages.lengths.copy()
            with pytest.raises(IndexError):
                self.pages.rollback(count)
            assert (self.pages.lengths == before).all()
            return
        self.pages.rollback(count)
        self.model = [rows[: len(rows) - count] for rows in self.model]

    @rule()
    def roll_back_too_far(self) -> None:
        for count in (-1, min(map(len, self.model)) + 1):
            with pytest.raises(IndexError):
                self.pages.rollback(count)

    @precondition(lambda self: self.window is not None)
    @rule()
    def release(self) -> None:
        assert self.window is not None
        row = len(self.model[0]) - self.window + 1
        self.pages.release_before(row)
        self.low = max(self.low, row // PAGE * PAGE)
        held = len(self.model[0]) - self.low
        if self.low:
            assert self.pages.nbytes <= (self.pages.capacity - self.low) * self.layer.token_bytes
            assert held <= self.window - 1 + PAGE

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pages"):
            return
        self.pages.check_integrity()
        for head, rows in enumerate(self.model):
            assert self.pages.lengths[head] == len(rows)
            keys, values = self.pages.rows(self.low, len(rows), head)
            if len(rows) > self.low:
                assert same_bits(keys[0], torch.stack([k for k, _ in rows[self.low :]]))
                assert same_bits(values[0], torch.stack([v for _, v in rows[self.low :]]))


class SlidingMachine(PagedMachine):
    window = 9


TestPagedRows = PagedMachine.TestCase
TestSlidingRows = SlidingMachine.TestCase
for case in (TestPagedRows, TestSlidingRows):
    case.settings = __import__("hypothesis").settings(max_examples=25, stateful_step_count=15, deadline=None)


def test_released_rows_cannot_be_read() -> None:
    pages = PagedRows(descriptor(window=5), CPU)
    pages.append(torch.zeros(2, 3 * PAGE, 16), torch.zeros(2, 3 * PAGE, 16))
    pages.release_before(2 * PAGE + 1)
    with pytest.raises(IndexError, match="released"):
        pages.rows(2 * PAGE - 1, 2 * PAGE + 1)
    assert pages.rows(2 * PAGE, 3 * PAGE)[0].shape == (2, PAGE, 16)


@given(
    data=st.data(),
    dtype=st.sampled_from(DTYPES),
    head=st.integers(0, 1),
    still=st.booleans(),
)
def test_copying_rows_compiled_and_by_indexing_is_the_same(data: Any, dtype: torch.dtype, head: int, still: bool) -> None:
    layer = descriptor(head_dim=4, value_dim=6, dtype=dtype)
    source = PagedRows(layer, CPU)
    source.append(bit_noise((2, 300, 4), dtype, 1), bit_noise((2, 300, 6), dtype, 2))
    index = np.array(sorted(data.draw(st.sets(st.integers(0, 299)))), dtype=np.int64)
    places = st.sets(st.integers(0, 399), min_size=len(index), max_size=len(index))
    target = index if still else np.array(sorted(data.draw(places)), dtype=np.int64)
    made = []
    for copy in (copy_rows_numba, copy_rows_reference):
        pages = PagedRows(layer, CPU)
        pages.append(torch.ones(2, 400, 4, dtype=dtype), torch.ones(2, 400, 6, dtype=dtype))
        copy(source, index, pages, target, head)
        made.append(pages.rows(0, 400))
    for ours, theirs, original in zip(made[0], made[1], source.rows(0, 300), strict=True):
        assert same_bits(ours, theirs)
        assert same_bits(ours[head, target], original[head, index])
        ours[head, target] = 1
        assert (ours == 1).all()


@given(data=st.data(), dtype=st.sampled_from(DTYPES), parts=st.integers(1, 5), still=st.booleans())
def test_copying_all_heads_in_parts_is_the_same(data: Any, dtype: torch.dtype, parts: int, still: bool) -> None:
    layer = descriptor(head_dim=4, value_dim=6, dtype=dtype)
    source = PagedRows(layer, CPU)
    source.append(bit_noise((2, 400, 4), dtype, 1), bit_noise((2, 400, 6), dtype, 2))
    per_head = []
    for _ in range(2):
        to = np.array(sorted(data.draw(st.sets(st.integers(0, 399)))), dtype=np.int64)
        per_head.append((to if still else np.arange(len(to), dtype=np.int64), to))
    made = []
    for compiled in (True, False):
        pages = PagedRows(layer, CPU)
        pages.append(torch.ones(2, 400, 4, dtype=dtype), torch.ones(2, 400, 6, dtype=dtype))
        if compiled:
            copy_heads_numba(source, pages, per_head, parts)
        else:
            for head, (at, to) in enumerate(per_head):
                copy_rows_reference(source, at, pages, to, head)
        made.append(pages.rows(0, 400))
    for ours, theirs in zip(*made, strict=True):
        assert same_bits(ours, theirs)


def test_pages_for() -> None:
    assert [pages_for(rows) for rows in (0, 1, PAGE, PAGE + 1)] == [0, 1, 1, 2]
