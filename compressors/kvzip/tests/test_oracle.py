"""Scores against kvpress's KVzipPress, which shares no code with ours, and where the two part on purpose."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vericache_compressor_kvzip import KVzipCompressor, KVzipOptions
from vericache_compressor_kvzip.passes import REPEAT_PART
from vericache_core import CompressContext, LayerDescriptor, PrefixView
from vericache_core.context import ScoreObserver

if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 4):
    pytest.skip("kvpress's own hook dies on transformers >= 5.4", allow_module_level=True)

USED = dict(ALL_ATTENTION_FUNCTIONS.items())
try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its dependencies, about themselves
        import kvpress  # type: ignore[import-not-found,unused-ignore]
except ImportError as missing:
    pytest.skip(f"kvpress is not importable here: {missing}", allow_module_level=True)
for implementation, function in USED.items():  # importing it wraps them all, for every other test too
    ALL_ATTENTION_FUNCTIONS[implementation] = function

LAYERS, HEADS, KV_HEADS, HEAD_DIM, TOKENS, CHUNK, BLOCK = 2, 4, 2, 16, 90, 32, 7
LETTERS = [chr(code) for code in range(32, 127)] + ["\n"]


class World:
    """A tiny random Llama and a tokenizer of letters in a folder, as kvpress wants it."""

    def __init__(self, folder: Path) -> None:
        config = transformers.LlamaConfig(
            vocab_size=len(LETTERS), hidden_size=HEADS * HEAD_DIM, intermediate_size=64, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, max_position_embeddings=1024,
        )  # fmt: skip
        torch.manual_seed(0)
        self.model = transformers.LlamaForCausalLM(config).eval()
        for name, weight in self.model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.data *= 12.0  # attention that is far from even
        letters = Tokenizer(models.WordLevel({letter: at for at, letter in enumerate(LETTERS)}, unk_token=" "))
        letters.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")
        self.folder = folder
        self.tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=letters)
        self.ids = torch.randint(0, len(LETTERS), (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
        self.layers = [
            LayerDescriptor(i, "full", HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, torch.float32, HEAD_DIM**-0.5)
            for i in range(LAYERS)
        ]
        ALL_ATTENTION_FUNCTIONS.register("kvzip-oracle", self._take)
        ALL_MASK_ATTENTION_FUNCTIONS.register("kvzip-oracle", sdpa_mask)

    def encode(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return found

    def _take(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **rest: Any) -> Any:
        self._rows.append((query[0], key[0], value[0]))
        return sdpa_attention_forward(module, query, key, value, mask, **rest)

    @torch.no_grad()
    def forward(self, ids: Sequence[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
        self._rows: list[tuple[Tensor, Tensor, Tensor]] = []
        self.model.set_attn_implementation("kvzip-oracle")
        self.model(torch.tensor([ids]), use_cache=False)
        return self._rows

    def score(self, token_ids: Sequence[int], observer: ScoreObserver) -> None:
        rows = self.forward([*self.ids, *token_ids])
        for start in range(TOKENS, TOKENS + len(token_ids), BLOCK):
            for index, (query, key, _) in enumerate(rows):
                observer(index, query[:, start : start + BLOCK], key[:, start : start + BLOCK])

    def ours(self, sinks: int, *, protected: int = 0, spaces: bool = False, keep: float = 0.5) -> tuple[Tensor, Any]:
        """Scores ``[layers, kv_heads, tokens]`` and what is kept; ``spaces`` leaves the request as the authors wrote it."""
        rows = self.forward(self.ids)
        prefix = PrefixView.from_tensors(self.layers, [r[1] for r in rows], [r[2] for r in rows], self.ids)
        context = CompressContext(
            score_runner=self.score,
            encoder=lambda text: self.encode(text if spaces else text.rstrip(" ")),
            protected=((0, protected),) if protected else (),
        )
        compressor = KVzipCompressor(KVzipOptions(chunk=CHUNK, sinks=sinks, postfix="\n", keep=keep))
        scores = compressor.scores(prefix, context)
        return torch.stack([scores[index] for index in range(LAYERS)]), compressor.select(prefix, scores, context)

    @torch.no_grad()
    def theirs(self, sinks: int, *, system: int = 0, removed: float = 0.5) -> Theirs:
        """The same of kvpress; its chat template puts ``system`` letters before the context."""
        self.tokenizer.chat_template = "s" * system + "{{ messages[0]['content'] + '\\n' }}" if system else None
        folder = self.folder / str(system)  # one each: saving does not remove an earlier template
        self.tokenizer.save_pretrained(folder)
        self.model.config._name_or_path = str(folder)
        self.model.set_attn_implementation("sdpa")

        class Watched(kvpress.KVzipPress):  # type: ignore[misc,unused-ignore]
            def compress_post(self, model: Any) -> None:
                found.scores = self.score_val[:, 0].clone()
                super().compress_post(model)

        found = Theirs()
        press = Watched(compression_ratio=removed, n_sink=sinks, chunk_size=CHUNK)
        with press(self.model):
            self.model.model(input_ids=torch.tensor([self.ids]), past_key_values=transformers.DynamicCache())
        for index, layer in enumerate(self.model.model.layers):
            _, heads, positions = layer.self_attn.masked_key_indices
            found.masked[index, heads, positions] = True
            layer.self_attn.masked_key_indices = None
        return found


@dataclass
class Theirs:
    scores: Tensor = field(default_factory=lambda: torch.empty(0))
    masked: Tensor = field(default_factory=lambda: torch.zeros((LAYERS, KV_HEADS, TOKENS), dtype=torch.bool))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("letters"))


@pytest.mark.parametrize("sinks", [0, 4])
def test_scores_of_the_context_equal_those_of_kvpress(world: World, sinks: int) -> None:
    """Four sinks that are no context, or none at all: then chunks and seen keys are the same ones."""
    scores, _ = world.ours(sinks)
    expected = world.theirs(sinks, system=sinks).scores
    assert len(range(sinks, TOKENS, CHUNK)) == 3  # both requests and a short chunk
    assert float(expected[..., sinks:].std()) > 0.01
    torch.testing.assert_close(scores[..., sinks:], expected[..., sinks:], rtol=0, atol=1e-5)


def test_the_same_pairs_survive_where_the_budgets_are_the_same(world: World) -> None:
    _, made = world.ours(0)
    masked = world.theirs(0).masked
    assert int(masked.sum()) == LAYERS * KV_HEADS * TOKENS // 2
    for index, layer in enumerate(made.layers):
        for head in range(KV_HEADS):
            assert layer.surviving.head(head).tolist() == torch.nonzero(~masked[index, head]).flatten().tolist()


def test_the_trailing_space_of_the_later_request_is_the_authors(world: World) -> None:
    assert REPEAT_PART.endswith("with ")
    scores, _ = world.ours(4, spaces=True)
    expected = world.theirs(4, system=4).scores
    first, later = slice(4, 4 + CHUNK), slice(4 + CHUNK, TOKENS)
    torch.testing.assert_close(scores[..., first], expected[..., first], rtol=0, atol=1e-5)
    assert float((scores[..., later] - expected[..., later]).abs().max()) > 1e-3


def test_passes_of_kvpress_see_sinks_where_ours_see_the_whole_system_prompt(world: World) -> None:
    scores, _ = world.ours(4, protected=20)
    expected = world.theirs(4, system=20).scores
    assert scores[..., :20].eq(0).all()
    assert expected[..., :20].eq(0).all()
    # Fewer keys share the same attention, so each gets more.
    more = expected[..., 20:] - scores[..., 20:]
    assert float(more.min()) > -1e-5
    assert float(more.max()) > 1e-3


def test_kvpress_evicts_the_system_prompt_and_ours_keeps_it(world: World) -> None:
    _, made = world.ours(4, protected=20)
    masked = world.theirs(4, system=20).masked
    assert not masked[..., :4].any()
    assert masked[..., 4:20].all()
    assert int(masked.sum()) == LAYERS * KV_HEADS * TOKENS // 2  # half of everything
    kept = [layer.surviving.head(head).tolist() for layer in made.layers for head in range(KV_HEADS)]
    assert all(head[:20] == list(range(20)) for head in kept)
    assert sum(map(len, kept)) == LAYERS * KV_HEADS * (20 + (TOKENS - 20) // 2)  # half of the context
