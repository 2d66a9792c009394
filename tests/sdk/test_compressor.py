from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.sdk.making import NormDropper, RoundQuantizer, cache, descriptor, stored_bytes, view
from vericache_core.builtin import AdversarialCompressor, AdversarialOptions
from vericache_core.compressor import Compressor, TokenDropCompressor, require_finite
from vericache_core.context import CompressContext
from vericache_core.errors import CompressorFault
from vericache_core.kv import LayerDescriptor, PrefixView
from vericache_core.plugins.options import Budget
from vericache_core.plugins.registry import default_registry

LAYERS = [descriptor(0), descriptor(1, window=8), descriptor(2, kv_heads=1, dtype=torch.bfloat16)]
CONTEXT = CompressContext()
BUILTIN = ["identity", "random", "adversarial"]


@pytest.mark.parametrize("name", BUILTIN)
def test_builtin_compressors_follow_the_protocol(name: str) -> None:
    compressor = default_registry().create(name)
    assert isinstance(compressor, Compressor)
    assert compressor.name == name
    assert [compressor.supports(layer) for layer in LAYERS] == [True, False, True]


@given(st.integers(1, 50), st.floats(0.01, 1.0))
def test_kept_count_is_the_budget_and_kept_rows_are_the_best(tokens: int, keep: float) -> None:
    options = Budget(keep=keep)
    (keys, _) = kv = cache(LAYERS, tokens)
    made = NormDropper(options).compress(view(LAYERS, kv, 0, tokens), CONTEXT)
    made.check_integrity()
    assert made.layers[1] is None
    layer = made.layers[0]
    assert layer is not None
    assert layer.surviving.counts == (options.kept_tokens(tokens),) * 2
    for head in range(2):
        norms, kept = keys[0][head].norm(dim=-1), layer.surviving.mask(head)
        assert not (~kept).any() or norms[kept].min() >= norms[~kept].max()


def test_protected_spans_survive_even_beyond_the_budget() -> None:
    kv = cache(LAYERS, 40)
    context = CompressContext(protected=((0, 3), (10, 22)))
    made = NormDropper(Budget(keep_tokens=2)).compress(view(LAYERS, kv, 0, 40), context)
    assert made.layers[0] is not None
    assert made.layers[0].surviving.head(0).tolist() == [0, 1, 2, *range(10, 22)]


@pytest.mark.parametrize("start", [1, 20, 40])
def test_token_drop_extend_keeps_all_and_rollback_undoes_it(start: int) -> None:
    compressor, kv = NormDropper(Budget(keep=0.3)), cache(LAYERS, 45)
    first = compressor.compress(view(LAYERS, kv, 0, start), CONTEXT)
    grown = compressor.extend(first, view(LAYERS, kv, start, 45), CONTEXT)
    grown.check_integrity()
    assert grown.tokens == 45
    layer = grown.layers[0]
    assert layer is not None
    assert layer.surviving.head(0)[-(45 - start) :].tolist() == list(range(start, 45))
    assert stored_bytes(compressor.rollback(grown, 45 - start)) == stored_bytes(first)
    partly = compressor.rollback(grown, 3)
    assert stored_bytes(partly) == stored_bytes(compressor.extend(first, view(LAYERS, kv, start, 42), CONTEXT)) or start > 42


@pytest.mark.parametrize("name", BUILTIN)
def test_inputs_are_not_changed_and_strides_do_not_matter(name: str) -> None:
    compressor, (keys, values) = default_registry().create(name), cache(LAYERS, 30)
    strided = [k.transpose(0, 1).contiguous().transpose(0, 1) for k in keys], [v.flip(1).flip(1)[:, ::1] for v in values]
    versions = [t._version for t in (*keys, *values)]
    plain = PrefixView(LAYERS, range(30), lambda i: (keys[i], values[i]))  # hands out the originals
    made = compressor.compress(plain, CONTEXT)
    assert [t._version for t in (*keys, *values)] == versions
    other = PrefixView(LAYERS, range(30), lambda i: (strided[0][i], strided[1][i]))
    assert stored_bytes(compressor.compress(other, CONTEXT)) == stored_bytes(made)


@pytest.mark.parametrize("name", BUILTIN)
def test_the_global_generator_is_neither_used_nor_moved(name: str) -> None:
    compressor, kv = default_registry().create(name), cache(LAYERS, 30)
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        results.append(stored_bytes(compressor.compress(view(LAYERS, kv, 0, 30), CONTEXT)))
        assert torch.equal(torch.get_rng_state(), state)
    assert results[0] == results[1]


def test_identity_keeps_every_bit() -> None:
    keys, values = kv = cache(LAYERS, 30)
    made = default_registry().create("identity").compress(view(LAYERS, kv, 0, 30), CONTEXT)
    layer = made.layers[2]
    assert layer is not None
    assert torch.equal(layer.tensors()["keys"], keys[2].flatten(0, 1))
    assert torch.equal(layer.tensors()["values"], values[2].flatten(0, 1))


def test_adversarial_noise_is_that_of_the_row_alone() -> None:
    compressor, kv = AdversarialCompressor(AdversarialOptions()), cache(LAYERS, 30)
    whole = compressor.compress(view(LAYERS, kv, 0, 30), CONTEXT).layers[0]
    part = compressor.compress(view(LAYERS, kv, 0, 11), CONTEXT).layers[0]
    assert torch.equal(whole.keys.decoded()[:, :11], part.keys.decoded())  # type: ignore[union-attr]
    assert whole.keys.decoded().std() > 5  # type: ignore[union-attr]


def test_scores_serve_any_budget() -> None:
    prefix = view(LAYERS, cache(LAYERS, 40), 0, 40)
    scores = NormDropper().scores(prefix, CONTEXT)
    for keep in (0.1, 0.5):
        compressor = NormDropper(Budget(keep=keep))
        assert stored_bytes(compressor.select(prefix, scores, CONTEXT)) == stored_bytes(compressor.compress(prefix, CONTEXT))
    del scores[2]
    with pytest.raises(CompressorFault, match="score of layer 2 has shape None"):
        NormDropper().select(prefix, scores, CONTEXT)


def test_a_dropper_without_a_score_says_so() -> None:
    class Empty(TokenDropCompressor):
        name = "empty"

    with pytest.raises(NotImplementedError, match="Empty writes neither"):
        Empty(Budget()).compress(view(LAYERS, cache(LAYERS, 4), 0, 4), CONTEXT)


class Broken(TokenDropCompressor):
    name = "broken"

    def __init__(self, result: Tensor) -> None:
        super().__init__(Budget())
        self.result = result

    def score(self, layer: LayerDescriptor, keys: Tensor, values: Tensor, context: CompressContext) -> Tensor:
        return self.result


@pytest.mark.parametrize(
    ("result", "words"),
    [(torch.zeros(2, 19), "shape"), (torch.zeros(20), "shape"), (torch.full((2, 20), math.nan), "NaN")],
    ids=["short", "flat", "nan"],
)
def test_a_bad_score_is_a_fault_that_names_compressor_and_layer(result: Tensor, words: str) -> None:
    kv = cache(LAYERS[:1], 20)
    with pytest.raises(CompressorFault, match=f"broken: score of layer 0.*{words}"):
        Broken(result).compress(view(LAYERS[:1], kv, 0, 20), CONTEXT)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("part", [0, 1])
def test_quantizers_refuse_what_is_not_finite_even_in_the_exact_part(bad: float, part: int) -> None:
    compressor, kv = RoundQuantizer(residual=64), cache(LAYERS, 20)
    held = compressor.compress(view(LAYERS, kv, 0, 10), CONTEXT)
    kv[part][2][0, 15, 3] = bad
    word = ("keys", "values")[part]
    with pytest.raises(CompressorFault, match=f"round: {word} of layer 2"):
        compressor.extend(held, view(LAYERS, kv, 10, 20), CONTEXT)
    with pytest.raises(CompressorFault, match=f"round: {word} of layer 2"):
        compressor.compress(view(LAYERS, kv, 0, 20), CONTEXT)


@given(st.integers(1, 70), st.data(), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_require_finite_finds_one_bad_element_anywhere(count: int, data: st.DataObject, dtype: torch.dtype) -> None:
    rows = torch.randn(count, 3, generator=torch.Generator().manual_seed(count)).to(dtype).T
    require_finite("x", LAYERS[0], keys=rows, values=rows[:, :0])
    bad = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    rows[data.draw(st.integers(0, 2)), data.draw(st.integers(0, count - 1))] = bad
    with pytest.raises(CompressorFault, match="x: values of layer 0 contain NaN or infinity"):
        require_finite("x", LAYERS[0], values=rows)


def test_require_finite_passes_finite_extremes() -> None:
    require_finite("x", LAYERS[0], keys=torch.tensor([1e38, -0.0, 1e-45]))


@pytest.mark.parametrize("compressor", [NormDropper(), RoundQuantizer()], ids=["drop", "quantize"])
def test_rollback_refuses_more_than_there_is(compressor: NormDropper | RoundQuantizer) -> None:
    made = compressor.compress(view(LAYERS, cache(LAYERS, 5), 0, 5), CONTEXT)
    for tokens in (6, -1):
        with pytest.raises(CompressorFault, match="cannot roll back"):
            compressor.rollback(made, tokens)
    assert stored_bytes(compressor.rollback(made, 0)) == stored_bytes(made)
    assert compressor.rollback(made, 5).tokens == 0


def test_what_was_not_asked_for_is_refused_by_name() -> None:
    for call, name in ((CONTEXT.queries, "queries"), (CONTEXT.attention_mass, "attention_mass")):
        with pytest.raises(CompressorFault, match=f"no {name}"):
            call(0)
    with pytest.raises(CompressorFault, match="no scoring"):
        CONTEXT.score([1], lambda *_: None)
    with pytest.raises(CompressorFault, match="tokenizer"):
        CONTEXT.encode("text")
