"""Draft, verify, reject, fold and swap in any order, against a cache that is nothing but two lists of rows."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from tests.cache.test_pages import bit_noise
from tests.sdk.making import NormDropper, RoundQuantizer, descriptor
from tests.watch import same_bits
from vericache_core.builtin import IdentityCompressor, IdentityOptions
from vericache_core.cache.draft import DraftKV
from vericache_core.cache.full import FullKV
from vericache_core.cache.ring import SwapRing
from vericache_core.compressor import Compressor
from vericache_core.context import CompressContext
from vericache_core.errors import SwapError
from vericache_core.kv import PrefixView
from vericache_core.plugins.options import Budget

CPU = torch.device("cpu")
LAYERS = [
    descriptor(0, head_dim=4, value_dim=6),
    descriptor(1, head_dim=4, value_dim=6, window=6),
    descriptor(2, head_dim=4, value_dim=6),
]
COMPRESSED = (0, 2)


def compressor_named(name: str) -> Compressor:
    every: dict[str, Compressor] = {
        "identity": IdentityCompressor(IdentityOptions()),
        "norm": NormDropper(Budget(keep=0.4)),
        "round": RoundQuantizer(unit=2, residual=4),
    }
    return every[name]


class DraftMachine(RuleBasedStateMachine):
    @initialize(
        tier=st.sampled_from(["device", "host", "disk"]),
        name=st.sampled_from(["identity", "norm", "round"]),
        prefix=st.integers(1, 150),
    )
    def start(self, tier: str, name: str, prefix: int) -> None:
        self.ring, self.seed, self.compressor = SwapRing(2, CPU), 0, compressor_named(name)
        self.full = FullKV(LAYERS, CPU, tier, (1,), self.ring)
        self.model: list[tuple[Tensor, Tensor]] = [(torch.empty(2, 0, 4), torch.empty(2, 0, 6)) for _ in LAYERS]
        self.draft: DraftKV | None = None
        while self.full.tokens < prefix:
            self._step(min(16, prefix - self.full.tokens), None)
        view = PrefixView(LAYERS, range(prefix), lambda layer: self.full.read(layer, 0, prefix))
        self.draft = DraftKV.build(self.full, self.compressor.compress(view, CompressContext()), COMPRESSED)

    def _rows(self, count: int) -> list[tuple[Tensor, Tensor]]:
        self.seed += 1
        draw = torch.Generator().manual_seed(self.seed)
        return [(torch.randn(2, count, 4, generator=draw), torch.randn(2, count, 6, generator=draw)) for _ in LAYERS]

    def _step(self, count: int, keep: int | None) -> None:
        """An authoritative step over ``count`` rows of which ``keep`` stay; checks what each layer was given to see."""
        rows = self._rows(count)
        self.full.open(count, self.draft)
        for layer, (keys, values), (held_keys, held_values) in zip(LAYERS, rows, self.model, strict=True):
            pages = self.full.pages(layer.index)
            low = 0 if layer.sliding_window is None else max(0, self.full.tokens - layer.sliding_window + 1)
            seen = pages.rows(low, self.full.tokens)
            assert same_bits(seen[0], held_keys[:, low:])
            assert same_bits(seen[1], held_values[:, low:])
            pages.write(np.full(2, self.full.tokens, dtype=np.int64), keys, values)
            self.full.wrote(layer.index, count)
            if self.draft is not None and layer.index in COMPRESSED:
                tail, base, _ = self.draft.layer(layer.index)
                tail.write(base, keys, values)
        self.full.close_step()
        kept = count if keep is None else keep
        self.full.advance(kept)
        if self.draft is not None:
            self.draft.accept(kept)
        self.model = [
            (torch.cat([k, new_k[:, :kept]], 1), torch.cat([v, new_v[:, :kept]], 1))
            for (k, v), (new_k, new_v) in zip(self.model, rows, strict=True)
        ]

    @rule(count=st.integers(1, 20))
    def draft_some(self, count: int) -> None:
        assert self.draft is not None
        for _ in range(count):
            for layer in LAYERS:
                pages, base, _ = self.draft.layer(layer.index)
                poison = bit_noise((2, 1, 4), torch.float32, 7), bit_noise((2, 1, 6), torch.float32, 8)
                pages.write(base, *poison)
            self.draft.advance(1)

    @rule(count=st.integers(1, 17), data=st.data())
    def verify(self, count: int, data: st.DataObject) -> None:
        assert self.draft is not None
        self.draft.retract()
        self._step(count, data.draw(st.integers(0, count)))

    @rule()
    def a_step_that_fails_half_way_counts_for_nothing(self) -> None:
        assert self.draft is not None
        self.draft.retract()
        rows = self._rows(3)
        self.full.open(3, self.draft)
        pages = self.full.pages(0)
        pages.write(np.full(2, self.full.tokens, dtype=np.int64), *rows[0])
        self.full.wrote(0, 3)
        self.full.close_step()
        self.ring.check_integrity()

    @rule()
    def fold(self) -> None:
        assert self.draft is not None
        self.draft.retract()
        before = self.draft.tokens
        extended = self.compressor.extend(self.draft.current(), self.draft.tail_view(), CompressContext())
        assert self.draft.fold(extended)
        assert (self.draft.tokens, self.draft.tail) == (before, 0)

    @rule()
    def compress_again(self) -> None:
        tokens = self.full.tokens
        view = PrefixView(LAYERS, range(tokens), lambda layer: self.full.read(layer, 0, tokens))
        self.draft = DraftKV.build(self.full, self.compressor.compress(view, CompressContext()), COMPRESSED)

    @invariant()
    def everything_agrees(self) -> None:
        if getattr(self, "draft", None) is None:
            return
        self.full.check_integrity()
        self.ring.check_integrity()
        draft = self.draft
        assert draft is not None
        draft.check_integrity()
        assert draft.prefix_tokens + draft.tail == self.full.tokens == self.model[0][0].shape[1]
        for index in COMPRESSED:
            pages, per_head = draft.held(index) or pytest.fail("nothing held")
            keys, values = self.model[index]
            for head, (at, position) in enumerate(per_head):
                mine = pages.rows(0, len(at), head)
                assert same_bits(mine[0][0], keys[head, position])
                assert same_bits(mine[1][0], values[head, position])
            missing = draft.missing(index, self.full.tokens) or []
            for head, absent in enumerate(missing):
                everything = np.sort(np.concatenate([absent, per_head[head][1]]))
                assert (everything == np.arange(self.full.tokens)).all()

    def teardown(self) -> None:
        if hasattr(self, "full"):
            self.full.close()
            self.ring.close()
            assert self.ring.nbytes == 0


TestDraft = DraftMachine.TestCase
TestDraft.settings = hypothesis.settings(max_examples=60, stateful_step_count=20, deadline=None)


def test_a_verify_after_close_is_an_error_and_not_old_rows() -> None:
    full = FullKV(LAYERS, CPU, "disk", (1,), SwapRing(2, CPU))
    full.close()
    full.open(1)
    full.tokens = 1
    with pytest.raises((SwapError, KeyError)):
        full.read(0, 0, 1)
    full.close()
