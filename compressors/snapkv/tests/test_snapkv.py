from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vericache_compressor_snapkv import SnapKVCompressor, SnapKVOptions, scoring
from vericache_compressor_snapkv.budgets import by_need, pyramid, rounded_to_total
from vericache_compressor_snapkv.plugin import vericache_compressors
from vericache_compressor_snapkv.scoring import pool, window_attention
from vericache_core import CompressContext, CompressedKV, LayerDescriptor, PrefixView
from vericache_core.errors import CompressorFault, OptionError
from vericache_core.plugins.options import parse_options
from vericache_core.plugins.testing import isolated_registry

settings.register_profile("snapkv", deadline=None)
settings.load_profile("snapkv")


def descriptor(index: int = 0, kv_heads: int = 2, group: int = 2, dtype: torch.dtype = torch.float32) -> LayerDescriptor:
    return LayerDescriptor(index, "full", kv_heads * group, kv_heads, 8, 8, dtype, 8**-0.5)


class Case:
    """A random prompt: layers, rows and a context that hands out the newest queries."""

    def __init__(self, tokens: int, layers: list[LayerDescriptor] | None = None, **context: Any) -> None:
        self.layers = layers or [descriptor(i) for i in range(3)]
        generator = torch.Generator().manual_seed(tokens)

        def draw(heads: int) -> Tensor:
            return torch.randn(heads, tokens, 8, generator=generator)

        self.keys = [(draw(layer.kv_heads) * 2).to(layer.dtype) for layer in self.layers]
        self.values = [draw(layer.kv_heads).to(layer.dtype) for layer in self.layers]
        self.queries = [(draw(layer.heads) * 2).to(layer.dtype) for layer in self.layers]
        self.more = context
        self.window = 32

    @property
    def prefix(self) -> PrefixView:
        return PrefixView(self.layers, range(self.keys[0].shape[1]), lambda i: (self.keys[i], self.values[i]))

    @property
    def context(self) -> CompressContext:
        return CompressContext(query_reader=lambda i: self.queries[i][:, -self.window :], **self.more)

    def compress(self, options: SnapKVOptions | None = None) -> CompressedKV:
        compressor = SnapKVCompressor(options)
        self.window = compressor.needs.queries
        made = compressor.compress(self.prefix, self.context)
        made.check_integrity()
        return made


def counts(made: CompressedKV) -> list[tuple[int, ...]]:
    return [layer.surviving.counts for layer in made.layers if layer is not None]


# -- the budget ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 2, 31, 32, 33, 64, 127, 128, 129, 300])
@pytest.mark.parametrize("budget", ["uniform", "pyramid"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_the_total_is_that_of_the_uniform_budget(tokens: int, budget: Any, adaptive: bool) -> None:
    for extra in ({}, {"keep": 0.9}, {"keep_tokens": 40}, {"keep": 0.01}, {"keep": 1.0}):
        options = SnapKVOptions(budget=budget, adaptive=adaptive, **extra)
        made = Case(tokens).compress(options)
        assert sum(map(sum, counts(made))) == 3 * 2 * options.kept_tokens(tokens)
        if not adaptive:
            assert all(len(set(per_head)) == 1 for per_head in counts(made))
        if budget == "uniform" and not adaptive:
            assert set(counts(made)) == {(options.kept_tokens(tokens),) * 2}


@pytest.mark.parametrize("tokens", [1, 5, 32, 33, 200])
def test_the_newest_tokens_survive_within_the_budget(tokens: int) -> None:
    options = SnapKVOptions(keep=0.25, adaptive=True, budget="pyramid")
    newest = min(tokens, 32, options.kept_tokens(tokens))
    for layer in Case(tokens).compress(options).layers:
        assert layer is not None
        for head in range(2):
            assert layer.surviving.head(head)[-newest:].tolist() == list(range(tokens - newest, tokens))


def test_protected_spans_survive_and_may_exceed_the_budget() -> None:
    made = Case(200, protected=((0, 20), (50, 60))).compress(SnapKVOptions(keep_tokens=40, budget="pyramid", adaptive=True))
    for layer in made.layers:
        assert layer is not None
        assert layer.surviving.counts == (62, 62)
        assert set(range(20)) | set(range(50, 60)) | set(range(168, 200)) == set(layer.surviving.head(1).tolist())


def test_protected_spans_are_paid_from_the_budget() -> None:
    made = Case(200, protected=((0, 10),)).compress(SnapKVOptions(keep_tokens=50))
    assert set(counts(made)) == {(50, 50)}


@given(st.integers(1, 60), st.integers(0, 300), st.integers(0, 300), st.integers(1, 40))
def test_pyramid_is_exact_falling_and_within_bounds(layers: int, average: int, more: int, beta: int) -> None:
    shares = pyramid(layers, average, average + more, beta)
    assert sum(shares) == layers * average
    assert shares == sorted(shares, reverse=True)
    assert shares[0] <= average + more
    assert min(shares) >= 0


def test_pyramid_by_hand() -> None:
    # average 100, beta 20: last 5, first 195, step 47.5: 195, 147.5, 100, 52.5, 5
    assert pyramid(5, 100, 1000, 20) == [195, 148, 100, 52, 5]
    assert pyramid(5, 100, 120, 20) == [120, 110, 100, 90, 80]
    assert pyramid(1, 100, 1000, 20) == [100]
    assert pyramid(0, 100, 1000, 20) == []
    assert pyramid(4, 100, 1000, 1) == [100] * 4


@given(st.integers(1, 5), st.integers(1, 40), st.data())
def test_adaptive_split_is_exact_and_never_below_the_floor(kv_heads: int, tokens: int, data: st.DataObject) -> None:
    share = data.draw(st.integers(0, tokens))
    floor = data.draw(st.sampled_from([0.0, 0.2, 0.5, 1.0]))
    values = st.lists(st.sampled_from([0.0, 0.1, 0.5, 2.0]), min_size=tokens, max_size=tokens)
    scores = torch.tensor(data.draw(st.lists(values, min_size=kv_heads, max_size=kv_heads)))
    heads = by_need(scores, share, floor)
    assert sum(heads) == kv_heads * share
    assert all(int(share * floor + 1e-9) <= head <= tokens for head in heads)


def test_adaptive_by_hand() -> None:
    scores = torch.tensor([[9.0, 8.0, 7.0, 6.0, 0.0], [5.0, 1.0, 1.0, 1.0, 1.0]])
    assert by_need(scores, 3, 0.0) == [4, 2]  # the best six: four of head 0, then 5.0 and the first 1.0 of head 1
    assert by_need(scores, 3, 1.0) == [3, 3]
    # floor 0.4: safe int(1.2) = 1 each, 4 left in proportion 4:2 -> 2.67 and 1.33 -> 3.67, 2.33 -> 4, 2
    assert by_need(scores, 3, 0.4) == [4, 2]
    assert by_need(torch.zeros(2, 5), 2, 0.0) == [4, 0]  # all equal: the lower head first


def test_adaptive_gives_more_to_the_head_that_needs_more() -> None:
    case = Case(200)
    for layer in range(3):
        case.keys[layer][1] *= 0.01  # head 1 attends to everything alike, so its scores are low everywhere
    for first, second in counts(case.compress(SnapKVOptions(adaptive=True, pooling="avg"))):
        assert first > second


@given(st.lists(st.fractions(0, 9), min_size=1, max_size=8))
def test_rounding_stays_next_to_the_shares(shares: list[Any]) -> None:
    shares = [*shares, -sum(shares) % 1]
    rounded = rounded_to_total(shares, int(sum(shares)))
    assert sum(rounded) == sum(shares)
    assert all(abs(whole - share) < 1 for whole, share in zip(rounded, shares, strict=True))


# -- scores ----------------------------------------------------------------------------------------


def test_uniform_attention_has_no_edge_bias() -> None:
    assert torch.equal(pool(torch.ones(2, 20), 7, "max"), torch.ones(2, 20))
    assert torch.equal(pool(torch.ones(2, 20), 7, "avg"), torch.ones(2, 20))


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=30), st.sampled_from([1, 3, 5, 7]))
def test_pooling_by_hand(scores: list[float], kernel: int) -> None:
    reach, row = kernel // 2, torch.tensor([scores], dtype=torch.float64)
    near = [scores[max(0, at - reach) : at + reach + 1] for at in range(len(scores))]
    assert pool(row, kernel, "max").tolist()[0] == [max(part) for part in near]
    expected = torch.tensor([sum(part) / len(part) for part in near], dtype=torch.float64)
    torch.testing.assert_close(pool(row, kernel, "avg")[0], expected)


def test_the_group_is_reduced_before_pooling() -> None:
    """Two query heads peak at different tokens: the mean of the maxima is not the maximum of the means."""
    keys = torch.zeros(1, 12, 8)
    keys[0, 2, 0] = keys[0, 4, 1] = 60.0
    queries = torch.zeros(2, 1, 8)
    queries[0, 0, 0] = queries[1, 0, 1] = 1.0
    layer = LayerDescriptor(0, "full", 2, 1, 8, 8, torch.float32, 1.0)
    options = SnapKVOptions(window=1, kernel=5, pooling="max", reducer="mean")
    score = SnapKVCompressor(options).score(layer, keys, keys, CompressContext(query_reader=lambda _: queries))
    assert score[0, 3] == pytest.approx(0.5)  # pooling first would give 1.0 here


def test_causal_inside_the_window() -> None:
    """A window row must not see newer tokens, or their logits would take mass from the past."""
    keys = torch.zeros(1, 6, 8)
    keys[0, 5, 0] = 50.0
    queries = torch.zeros(1, 2, 8)
    queries[0, :, 0] = 1.0
    received = window_attention(queries, keys, 1.0, "sum")
    assert received[0, 0].item() == pytest.approx(1 / 5)  # from the first row, which sees five equal keys
    assert received[0, 5].item() == pytest.approx(1.0)


def test_key_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(130)
    whole = window_attention(case.queries[0][:, -32:], case.keys[0], 0.3, "mean")
    monkeypatch.setattr(scoring, "KEY_BLOCK", 17)
    torch.testing.assert_close(window_attention(case.queries[0][:, -32:], case.keys[0], 0.3, "mean"), whole, rtol=1e-6, atol=0)


def test_nothing_of_tokens_by_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    made, softmax = [], torch.softmax

    def watched(scores: Tensor, dim: int) -> Tensor:
        made.append(scores.numel())
        return softmax(scores, dim)

    monkeypatch.setattr(torch, "softmax", watched)
    Case(400).compress(SnapKVOptions(window=8))
    assert set(made) == {2 * 8 * 400}


def test_low_precision_inputs_are_scored_in_float32() -> None:
    layers = [descriptor(dtype=torch.bfloat16)]
    case = Case(300, layers)
    score = SnapKVCompressor(SnapKVOptions(kernel=1)).score(layers[0], case.keys[0], case.values[0], case.context)
    assert score.dtype == torch.float32
    assert len(set(score[0].tolist())) > 200


def test_ties_go_to_the_lower_position() -> None:
    case = Case(100)
    for layer in range(3):
        case.keys[layer].zero_()
    made = case.compress(SnapKVOptions(window=10, keep_tokens=30))
    for layer_made in made.layers:
        assert layer_made is not None
        assert layer_made.surviving.head(1).tolist() == [*range(20), *range(90, 100)]


# -- behaviour -------------------------------------------------------------------------------------


def test_longer_observations_than_asked_for_are_cut() -> None:
    case, options = Case(100), SnapKVOptions(keep=0.6)
    made = case.compress(options)
    case.window = 100
    assert SnapKVCompressor(options).compress(case.prefix, case.context).to_payload() == made.to_payload()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("part", ["queries", "keys", "values"])
def test_what_is_not_finite_is_refused_by_name(bad: float, part: str) -> None:
    case = Case(50)
    getattr(case, part)[1][0, 40, 0] = bad
    with pytest.raises(CompressorFault, match=f"snapkv: {part} of layer 1"):
        case.compress()


def test_products_beyond_float32_are_refused_by_name() -> None:
    """Every logit is finite in float64, no softmax of them is in float32: an error, never an arbitrary choice."""
    case = Case(50)
    case.keys[1][0, :20, 3], case.queries[1][:, -4:] = 3e37, 1e4
    with pytest.raises(CompressorFault, match="snapkv: score of layer 1 contains NaN"):
        case.compress()


def test_queries_of_the_wrong_shape_are_refused() -> None:
    case = Case(50)
    case.queries[2] = case.queries[2][:2]
    with pytest.raises(CompressorFault, match="queries of layer 2"):
        case.compress()
    with pytest.raises(CompressorFault, match="no queries"):
        SnapKVCompressor().compress(case.prefix, CompressContext())


def test_sliding_layers_stay_uncompressed() -> None:
    layers = [descriptor(0), LayerDescriptor(1, "sliding", 4, 2, 8, 8, torch.float32, 1.0, 16)]
    made = Case(60, layers).compress()
    assert [layer is None for layer in made.layers] == [False, True]


def test_inputs_are_not_changed_and_strides_do_not_matter() -> None:
    case, other = Case(90), Case(90)
    versions = [t._version for t in (*case.keys, *case.values, *case.queries)]
    made = case.compress()
    assert [t._version for t in (*case.keys, *case.values, *case.queries)] == versions
    other.keys = [k.transpose(1, 2).contiguous().transpose(1, 2) for k in other.keys]
    other.queries = [torch.cat([q, q], 2)[..., :8] for q in other.queries]
    assert other.compress().to_payload() == made.to_payload()


CHILD = """
import sys, torch
torch.set_num_threads(int(sys.argv[1])); torch.manual_seed(5)
sys.path.insert(0, sys.argv[2])
import hashlib
from test_snapkv import Case, SnapKVOptions
for options in (SnapKVOptions(), SnapKVOptions(adaptive=True, budget="pyramid", pooling="avg")):
    print(hashlib.sha256(Case(700).compress(options).to_payload()).hexdigest())
"""


def test_the_same_bytes_with_one_and_two_threads_in_other_processes(pytestconfig: pytest.Config) -> None:
    here = str(pytestconfig.rootpath / "compressors/snapkv/tests")
    runs = [subprocess.run([sys.executable, "-c", CHILD, n, here], capture_output=True, check=True).stdout for n in "12"]
    assert runs[0] == runs[1] != b""


def test_bytes_equal_the_formula() -> None:
    made = Case(257).compress(SnapKVOptions(keep=0.25))
    per_layer = 2 * 64 * 2 * 8 * 4 + 2 * math.ceil(257 / 8)
    assert made.nbytes == 3 * per_layer


@pytest.mark.parametrize("options", [{}, {"adaptive": "true", "keep": "0.4", "pooling": "avg", "window": "5"}])
def test_extend_rollback_and_payload(options: dict[str, str]) -> None:
    parsed = parse_options(SnapKVOptions, options)
    case = Case(120)
    made = case.compress(parsed)
    compressor = SnapKVCompressor(parsed)
    more = PrefixView(case.layers, range(7), lambda i: (case.keys[i][:, :7], case.values[i][:, :7]), start=120)
    grown = compressor.extend(made, more, CompressContext())
    grown.check_integrity()
    assert all(b == tuple(n + 7 for n in a) for a, b in zip(counts(made), counts(grown), strict=True))
    assert compressor.rollback(grown, 7).to_payload() == made.to_payload()
    (spec,) = vericache_compressors()
    with isolated_registry(spec):
        again = CompressedKV.from_payload(grown.to_payload())
    assert again.to_payload() == grown.to_payload()
    assert again.surviving == grown.surviving


# -- options ---------------------------------------------------------------------------------------


def test_defaults() -> None:
    options = SnapKVOptions()
    assert (options.window, options.kernel, options.pooling, options.reducer) == (32, 7, "max", "mean")
    assert (options.budget, options.adaptive, options.kept_tokens(400)) == ("uniform", False, 100)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"kernel": "6"}, "kernel"),
        ({"kernel": "0"}, "kernel"),
        ({"window": "0"}, "window"),
        ({"pooling": "median"}, "pooling"),
        ({"reducer": "min"}, "reducer"),
        ({"budget": "cube"}, "budget"),
        ({"floor": "1.5"}, "floor"),
        ({"keep": "0"}, "keep"),
        ({"keep": "0.5", "keep_tokens": "10"}, "keep_tokens"),
        ({"windwo": "3"}, "window"),
    ],
    ids=str,
)
def test_bad_options_are_refused_by_name(given: dict[str, str], word: str) -> None:
    with pytest.raises(OptionError, match=word):
        parse_options(SnapKVOptions, given)
