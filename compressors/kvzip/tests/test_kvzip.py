from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vericache_compressor_kvzip import KVzipCompressor, KVzipOptions, dump_scores, load_scores
from vericache_compressor_kvzip.passes import REPEAT_ALL, REPEAT_PART
from vericache_compressor_kvzip.plugin import vericache_compressors
from vericache_core import CompressContext, CompressedKV, LayerDescriptor, PrefixView
from vericache_core.context import ScoreObserver
from vericache_core.errors import CompressorFault, OptionError, PayloadError
from vericache_core.plugins.options import parse_options
from vericache_core.plugins.testing import isolated_registry

LAYERS, HEADS, KV_HEADS, HEAD_DIM, TOKENS, BLOCK = 2, 4, 2, 16, 90, 7


def encode(text: str) -> list[int]:
    """A tokenizer of letters."""
    return [ord(letter) % 97 for letter in text]


class World:
    """A tiny random Llama behind the SDK's context: passes run for real, in blocks of a few rows."""

    def __init__(self) -> None:
        config = transformers.LlamaConfig(
            vocab_size=97,
            hidden_size=HEADS * HEAD_DIM,
            intermediate_size=64,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            max_position_embeddings=512,
        )
        torch.manual_seed(0)
        self.model = transformers.LlamaForCausalLM(config).eval()
        for name, weight in self.model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.data *= 12.0
        ALL_ATTENTION_FUNCTIONS.register("kvzip-test", self._take)
        ALL_MASK_ATTENTION_FUNCTIONS.register("kvzip-test", sdpa_mask)
        self.ids = torch.randint(0, 97, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
        self.passes: list[tuple[int, ...]] = []
        self.layers = [
            LayerDescriptor(i, "full", HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, torch.float32, HEAD_DIM**-0.5)
            for i in range(LAYERS)
        ]
        rows = self.forward(self.ids)
        self.keys, self.values = [row[1] for row in rows], [row[2] for row in rows]

    def _take(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **rest: Any) -> Any:
        self._rows.append((query[0], key[0], value[0]))
        return sdpa_attention_forward(module, query, key, value, mask, **rest)

    @torch.no_grad()
    def forward(self, ids: Sequence[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
        self._rows: list[tuple[Tensor, Tensor, Tensor]] = []
        self.model.set_attn_implementation("kvzip-test")
        self.model(torch.tensor([ids]), use_cache=False)
        return self._rows

    @torch.no_grad()
    def eager_weights(self, ids: Sequence[int]) -> list[Tensor]:
        self.model.set_attn_implementation("eager")
        made = self.model(torch.tensor([ids]), use_cache=False, output_attentions=True)
        return [part[0] for part in made.attentions]

    def score(self, token_ids: Sequence[int], observer: ScoreObserver) -> None:
        self.passes.append(tuple(token_ids))
        rows = self.forward([*self.ids, *token_ids])
        for start in range(TOKENS, TOKENS + len(token_ids), BLOCK):
            for index, (query, key, _) in enumerate(rows):
                observer(index, query[:, start : start + BLOCK], key[:, start : start + BLOCK])

    @property
    def prefix(self) -> PrefixView:
        return PrefixView.from_tensors(self.layers, self.keys, self.values, self.ids)

    def context(self, **more: Any) -> CompressContext:
        return CompressContext(**{"score_runner": self.score, "encoder": encode, **more})


@pytest.fixture(scope="module")
def shared() -> World:
    return World()


@pytest.fixture
def world(shared: World) -> World:
    shared.passes.clear()
    return shared


def counts(made: CompressedKV) -> list[tuple[int, ...]]:
    return [layer.surviving.counts for layer in made.layers if layer is not None]


# -- the passes and the scores ---------------------------------------------------------------------


def test_passes_are_request_lead_in_postfix_chunk(world: World) -> None:
    KVzipCompressor(KVzipOptions(chunk=40, postfix="A:")).scores(world.prefix, world.context())
    context = world.ids[4:]  # beyond the sinks
    postfix = encode("A:")
    assert world.passes == [
        (*encode(REPEAT_ALL), *postfix, *context[:40]),
        (*encode(REPEAT_PART), *context[32:40], *postfix, *context[40:80]),
        (*encode(REPEAT_PART), *context[72:80], *postfix, *context[80:]),
    ]


@pytest.mark.parametrize(
    ("options", "protected"),
    [
        (KVzipOptions(), ()),
        (KVzipOptions(chunk=33), ((0, 20),)),
        (KVzipOptions(chunk=25, sinks=0, request="none"), ()),
        (KVzipOptions(chunk=30, sinks=2, postfix="x"), ((10, 15), (60, 61))),
    ],
    ids=["defaults", "system prompt", "bare", "spans inside"],
)
def test_scores_equal_eager_attention(world: World, options: KVzipOptions, protected: tuple[tuple[int, int], ...]) -> None:
    """Oracle: eager weights of the whole sequence, made a softmax over the seen keys by dividing by their sum."""
    scores = KVzipCompressor(options).scores(world.prefix, world.context(protected=protected))
    always = {at for start, stop in protected for at in range(start, stop)} | set(range(options.sinks))
    free = [at for at in range(TOKENS) if at not in always]
    chunks = [free[start : start + options.chunk] for start in range(0, len(free), options.chunk)]
    assert len(world.passes) == len(chunks)
    for ids, chunk in zip(list(world.passes), chunks, strict=True):
        seen = [*sorted(always), *chunk, *range(TOKENS, TOKENS + len(ids))]
        for index, weights in enumerate(world.eager_weights([*world.ids, *ids])):
            rows = weights[:, TOKENS:].double()
            paid = rows[:, :, chunk] / rows[:, :, seen].sum(-1, keepdim=True)
            expected = paid.amax(1).view(KV_HEADS, -1, len(chunk)).amax(1)
            torch.testing.assert_close(scores[index][:, chunk].double(), expected, rtol=1e-4, atol=1e-5)
    assert all(score[:, sorted(always)].eq(0).all() for score in scores.values())


def test_a_pass_that_shows_too_little_or_too_much_is_a_fault(world: World) -> None:
    def little(ids: Sequence[int], observer: ScoreObserver) -> None:
        world.score(ids[:-1], observer)

    def much(ids: Sequence[int], observer: ScoreObserver) -> None:
        world.score([*ids, 1], observer)

    with pytest.raises(CompressorFault, match=r"showed \d+ of \d+ rows of layer 0"):
        KVzipCompressor().compress(world.prefix, world.context(score_runner=little))
    with pytest.raises(CompressorFault, match="more rows of layer 0"):
        KVzipCompressor().compress(world.prefix, world.context(score_runner=much))


@pytest.mark.parametrize("part", ["queries", "keys"])
def test_what_is_not_finite_is_refused_by_name(world: World, part: str) -> None:
    def poisoned(ids: Sequence[int], observer: ScoreObserver) -> None:
        def spoil(layer: int, queries: Tensor, keys: Tensor) -> None:
            broken = {"queries": queries.clone(), "keys": keys.clone()}
            if layer == 1:
                broken[part][0, 0, 0] = math.nan
            observer(layer, broken["queries"], broken["keys"])

        world.score(ids, spoil)

    with pytest.raises(CompressorFault, match=f"kvzip: {part} of layer 1"):
        KVzipCompressor().compress(world.prefix, world.context(score_runner=poisoned))


@pytest.mark.parametrize("part", ["keys", "values"])
def test_a_prefix_that_is_not_finite_is_refused_by_name(world: World, part: str) -> None:
    rows = {"keys": [k.clone() for k in world.keys], "values": [v.clone() for v in world.values]}
    rows[part][1][1, 70, 2] = math.inf
    with pytest.raises(CompressorFault, match=f"kvzip: {part} of layer 1"):
        KVzipCompressor().compress(PrefixView.from_tensors(world.layers, rows["keys"], rows["values"]), world.context())
    assert world.passes == []


def test_without_a_tokenizer_the_way_out_is_named(world: World) -> None:
    with pytest.raises(CompressorFault, match="request=none"):
        KVzipCompressor().compress(world.prefix, world.context(encoder=None))
    KVzipCompressor(KVzipOptions(request="none")).compress(world.prefix, world.context(encoder=None)).check_integrity()
    with pytest.raises(CompressorFault, match="no scoring"):
        KVzipCompressor().compress(world.prefix, world.context(score_runner=None))


# -- the budget ------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["pair", "uniform"])
@pytest.mark.parametrize("sinks", [0, 4])
@pytest.mark.parametrize("extra", [{}, {"keep": 0.01}, {"keep": 0.9}, {"keep": 1.0}, {"keep_tokens": 1}, {"keep_tokens": 33}])
def test_the_total_is_exact_and_no_head_is_empty(world: World, level: Any, sinks: int, extra: dict[str, Any]) -> None:
    options = KVzipOptions(level=level, sinks=sinks, chunk=45, **extra)
    made = KVzipCompressor(options).compress(world.prefix, world.context())
    made.check_integrity()
    assert sum(map(sum, counts(made))) == LAYERS * KV_HEADS * options.kept_tokens(TOKENS)
    assert min(map(min, counts(made))) >= 1
    if level == "uniform":
        assert set(counts(made)) == {(options.kept_tokens(TOKENS),) * KV_HEADS}


def test_the_global_budget_takes_the_best_of_all_layers_and_heads(world: World) -> None:
    options = KVzipOptions(sinks=0)
    compressor = KVzipCompressor(options)
    scores = compressor.scores(world.prefix, world.context())
    made = compressor.select(world.prefix, scores, world.context())
    everything = sorted(
        (-scores[layer][head, at].item(), layer, head, at)
        for layer in range(LAYERS)
        for head in range(KV_HEADS)
        for at in range(TOKENS)
    )
    best = {(layer, head, at) for _, layer, head, at in everything[: LAYERS * KV_HEADS * options.kept_tokens(TOKENS)]}
    kept = {
        (index, head, at)
        for index, layer in enumerate(made.layers)
        if layer is not None
        for head in range(KV_HEADS)
        for at in layer.surviving.head(head).tolist()
    }
    assert kept == best
    assert len(set(counts(made)[0] + counts(made)[1])) > 1  # ragged, or nothing was shown


def test_ties_keep_the_exact_count_at_the_lowest_positions(world: World) -> None:
    """The reference keeps what is strictly above the threshold, here nothing."""
    scores = {index: torch.ones(KV_HEADS, TOKENS) for index in range(LAYERS)}
    made = KVzipCompressor(KVzipOptions(sinks=0)).select(world.prefix, scores, world.context())
    # 27 each: one token for every head, then the first head of the first layer takes what it can.
    assert counts(made) == [(TOKENS, 4 * 27 - TOKENS - 2), (1, 1)]
    assert all(layer is not None and layer.surviving.head(1)[0] == 0 for layer in made.layers)


def test_protected_spans_survive_beside_the_budget(world: World) -> None:
    options = KVzipOptions(keep=0.5)
    made = KVzipCompressor(options).compress(world.prefix, world.context(protected=((0, 20), (50, 60))))
    assert sum(map(sum, counts(made))) == LAYERS * KV_HEADS * (30 + 30)
    for layer in made.layers:
        assert layer is not None
        assert set(range(20)) | set(range(50, 60)) <= set(layer.surviving.head(1).tolist())
    whole = KVzipCompressor(options).compress(world.prefix, world.context(protected=((0, TOKENS),)))
    assert set(counts(whole)) == {(TOKENS, TOKENS)}


def test_sinks_survive_within_the_budget(world: World) -> None:
    for keep, sinks in ((2, [0, 1]), (4, [0, 1, 2, 3]), (30, [0, 1, 2, 3])):
        made = KVzipCompressor(KVzipOptions(keep_tokens=keep)).compress(world.prefix, world.context())
        assert sum(map(sum, counts(made))) == LAYERS * KV_HEADS * keep
        for layer in made.layers:
            assert layer is not None
            assert layer.surviving.head(0)[: len(sinks)].tolist() == sinks


def test_an_empty_context_needs_no_pass(world: World) -> None:
    short = PrefixView.from_tensors(world.layers, [k[:, :3] for k in world.keys], [v[:, :3] for v in world.values])
    made = KVzipCompressor().compress(short, CompressContext())
    assert sum(map(sum, counts(made))) == LAYERS * KV_HEADS * 1
    assert world.passes == []


# -- the offline form --------------------------------------------------------------------------------


def test_stored_scores_serve_other_budgets_without_new_passes(world: World, tmp_path: Path) -> None:
    folder = str(tmp_path / "scores")
    first = KVzipCompressor(KVzipOptions(keep=0.5, scores_dir=folder)).compress(world.prefix, world.context())
    passes = len(world.passes)
    assert passes > 0
    offline = KVzipCompressor(KVzipOptions(keep=0.2, scores_dir=folder)).compress(world.prefix, world.context())
    assert len(world.passes) == passes
    online = KVzipCompressor(KVzipOptions(keep=0.2)).compress(world.prefix, world.context())
    assert offline.surviving == online.surviving
    assert first.surviving != online.surviving
    assert [path.suffix for path in Path(folder).iterdir()] == [".kvzip"]


@pytest.mark.parametrize("change", ["chunk", "postfix", "protected", "keys", "ids", "damage"])
def test_stored_scores_of_anything_else_are_not_used(world: World, tmp_path: Path, change: str) -> None:
    options: dict[str, Any] = {"scores_dir": str(tmp_path)}
    KVzipCompressor(KVzipOptions(**options)).scores(world.prefix, world.context())
    world.passes.clear()
    context, keys, ids = world.context(), [k.clone() for k in world.keys], list(world.ids)
    if change in ("chunk", "postfix"):
        options[change] = {"chunk": 50, "postfix": "y"}[change]
    elif change == "protected":
        context = world.context(protected=((0, 9),))
    elif change == "keys":
        keys[1][0, 50, 0] += 1e-6
    elif change == "ids":
        ids[50] = (ids[50] + 1) % 97
    else:
        (path,) = tmp_path.iterdir()
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(bytes(data))
    KVzipCompressor(KVzipOptions(**options)).scores(PrefixView.from_tensors(world.layers, keys, world.values, ids), context)
    assert world.passes


def test_scores_that_cannot_be_stored_cost_nothing_but_the_passes(world: World, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    KVzipCompressor(KVzipOptions(scores_dir=str(blocked))).compress(world.prefix, world.context()).check_integrity()
    assert list(tmp_path.iterdir()) == [blocked]


def test_scores_round_trip_and_damage_is_noticed() -> None:
    scores = {0: torch.rand(2, 5), 3: torch.rand(1, 5)}
    data = dump_scores(scores, "key")
    again = load_scores(data, "key")
    assert again.keys() == scores.keys()
    assert all(torch.equal(again[index], scores[index]) for index in scores)
    for bad in (b"", data[:-1], data[:50], b"x" + data[1:], data[:60] + bytes([data[60] ^ 1]) + data[61:]):
        with pytest.raises(PayloadError):
            load_scores(bad, "key")
    with pytest.raises(PayloadError, match="another prefix"):
        load_scores(data, "other")


# -- behaviour -------------------------------------------------------------------------------------


def test_the_same_bytes_every_time_and_inputs_unchanged(world: World) -> None:
    versions = [t._version for t in (*world.keys, *world.values)]
    first = KVzipCompressor().compress(world.prefix, world.context()).to_payload()
    torch.manual_seed(9)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert KVzipCompressor().compress(world.prefix, world.context()).to_payload() == first
    finally:
        torch.set_num_threads(threads)
    assert [t._version for t in (*world.keys, *world.values)] == versions


def test_sliding_layers_are_neither_scored_nor_compressed(world: World) -> None:
    sliding = LayerDescriptor(1, "sliding", HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, torch.float32, 0.25, 16)
    prefix = PrefixView.from_tensors([world.layers[0], sliding], world.keys, world.values, world.ids)
    made = KVzipCompressor().compress(prefix, world.context())
    assert made.layers[1] is None
    assert sum(map(sum, counts(made))) == KV_HEADS * 27


def test_extend_rollback_and_payload(world: World) -> None:
    compressor = KVzipCompressor()
    made = compressor.compress(world.prefix, world.context())
    more = PrefixView(world.layers, range(5), lambda i: (world.keys[i][:, :5], world.values[i][:, :5]), TOKENS)
    grown = compressor.extend(made, more, CompressContext())
    grown.check_integrity()
    assert compressor.rollback(grown, 5).to_payload() == made.to_payload()
    (spec,) = vericache_compressors()
    with isolated_registry(spec):
        again = CompressedKV.from_payload(grown.to_payload())
    assert again.to_payload() == grown.to_payload()
    rows = sum(map(sum, counts(made)))
    assert made.nbytes == rows * 2 * HEAD_DIM * 4 + LAYERS * KV_HEADS * math.ceil(TOKENS / 8)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"level": "head"}, "level"),
        ({"chunk": "0"}, "chunk"),
        ({"sinks": "-1"}, "sinks"),
        ({"request": "maybe"}, "request"),
        ({"keep": "1.5"}, "keep"),
        ({"ratio": "0.5"}, "ratio"),
    ],
    ids=str,
)
def test_bad_options_are_refused_by_name(given: dict[str, str], word: str) -> None:
    with pytest.raises(OptionError, match=word):
        parse_options(KVzipOptions, given)
