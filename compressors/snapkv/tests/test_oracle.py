"""Kept sets against brute force from the eager attention weights of real architectures, random weights, fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from vericache_compressor_snapkv import SnapKVCompressor, SnapKVOptions
from vericache_compressor_snapkv.scoring import window_attention
from vericache_core import CompressContext, LayerDescriptor, PrefixView

LAYERS, HEAD_DIM, TOKENS = 2, 16, 150
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": None},
    "Granite": {"attention_multiplier": 0.37},
    "Phi3": {"partial_rotary_factor": 0.5, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
HEADS = {1: (2, 2), 2: (4, 2), 4: (8, 2), 7: (7, 1)}


class Taken:
    """What one forward showed: per layer queries, keys, values and the scaling, and eager's weights."""

    def __init__(self, architecture: str, group: int) -> None:
        self.heads, self.kv_heads = HEADS[group]
        config_type = getattr(transformers, f"{architecture}Config")
        config = config_type(
            vocab_size=97,
            hidden_size=self.heads * HEAD_DIM,
            intermediate_size=64,
            num_hidden_layers=LAYERS,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=HEAD_DIM,
            max_position_embeddings=512,
            **ARCHITECTURES[architecture],
        )
        torch.manual_seed(group)
        model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name or "qkv_proj" in name:
                weight.data *= 12.0  # spread the attention: with the usual initial weights it is nearly uniform
        ids = torch.randint(0, 97, (1, TOKENS))
        with torch.no_grad():
            model.set_attn_implementation("eager")
            self.weights = [part[0] for part in model(ids, output_attentions=True, use_cache=False).attentions]
            self.rows: list[tuple[Tensor, Tensor, Tensor, float]] = []
            ALL_ATTENTION_FUNCTIONS.register("taking", self._take)
            ALL_MASK_ATTENTION_FUNCTIONS.register("taking", sdpa_mask)
            model.set_attn_implementation("taking")
            model(ids, use_cache=False)

    def _take(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, scaling: float, **rest: Any) -> Any:
        self.rows.append((query[0], key[0], value[0], scaling))
        return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **rest)

    def compress(self, options: SnapKVOptions) -> list[list[list[int]]]:
        layers = [
            LayerDescriptor(i, "full", self.heads, self.kv_heads, HEAD_DIM, HEAD_DIM, torch.float32, scaling)
            for i, (_, _, _, scaling) in enumerate(self.rows)
        ]
        prefix = PrefixView.from_tensors(layers, [row[1] for row in self.rows], [row[2] for row in self.rows])
        context = CompressContext(query_reader=lambda i: self.rows[i][0][:, -options.window :])
        made = SnapKVCompressor(options).compress(prefix, context)
        made.check_integrity()
        return [[layer.surviving.head(h).tolist() for h in range(self.kv_heads)] for layer in made.layers if layer is not None]


@pytest.fixture(scope="module", params=[(a, g) for a in ARCHITECTURES for g in HEADS], ids=lambda p: f"{p[0]}-{p[1]}")
def taken(request: pytest.FixtureRequest) -> Taken:
    return Taken(*request.param)


def brute_force(weights: Tensor, kv_heads: int, options: SnapKVOptions) -> list[list[int]]:
    """Straight from the definition, one number at a time; ``weights`` is ``[heads, tokens, tokens]``."""
    heads, tokens, _ = weights.shape
    group, past, reach = heads // kv_heads, tokens - options.window, options.kernel // 2
    kept = []
    for kv_head in range(kv_heads):
        members = weights[kv_head * group : (kv_head + 1) * group, past:, :past].double().sum(1)
        reduced = {"mean": members.mean(0), "sum": members.sum(0), "max": members.max(0).values}[options.reducer].tolist()
        pooled = []
        for at in range(past):
            near = reduced[max(0, at - reach) : at + reach + 1]
            pooled.append(max(near) if options.pooling == "max" else sum(near) / len(near))
        best = sorted(range(past), key=lambda at: (-round(pooled[at], 12), at))[: options.kept_tokens(tokens) - options.window]
        kept.append(sorted([*best, *range(past, tokens)]))
    return kept


OPTIONS = [
    SnapKVOptions(),
    SnapKVOptions(window=16, kernel=5, pooling="avg", keep=0.4),
    SnapKVOptions(window=8, kernel=1, pooling="max", reducer="max", keep=0.1),
    SnapKVOptions(window=32, kernel=3, pooling="max", reducer="max", keep_tokens=64),
    SnapKVOptions(window=5, kernel=7, pooling="avg", reducer="sum", keep=0.5),
]


def test_the_captured_queries_are_those_of_the_weights(taken: Taken) -> None:
    for (query, key, _, scaling), weights in zip(taken.rows, taken.weights, strict=True):
        received = window_attention(query[:, -32:], key, scaling, "sum")
        grouped = weights[:, -32:].double().sum(1).view(taken.kv_heads, -1, TOKENS).sum(1)
        torch.testing.assert_close(received, grouped, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: f"w{o.window}-k{o.kernel}-{o.pooling}-{o.reducer}")
def test_kept_sets_equal_brute_force(taken: Taken, options: SnapKVOptions) -> None:
    expected = [brute_force(weights, taken.kv_heads, options) for weights in taken.weights]
    assert taken.compress(options) == expected


def kvpress_scores(weights: Tensor, kv_heads: int, window: int, kernel: int) -> Tensor:
    """What kvpress 0.5's SnapKV computes, in our own words: ``[kv_heads, tokens - window]``.

    It averages over the window, pools each query head (zeros beyond the edges count), then averages over the
    group. Three differences to ours: mean instead of sum over the window (a constant), pooling before
    reducing (the same for averages), and the zeros at the edges.
    """
    heads, tokens, _ = weights.shape
    seen = weights[:, tokens - window :, : tokens - window].mean(1)
    pooled = torch.nn.functional.avg_pool1d(seen.unsqueeze(1), kernel, 1, kernel // 2).squeeze(1)
    return pooled.view(kv_heads, heads // kv_heads, -1).mean(1)


def test_kvpress_formula_differs_at_the_edges_only(taken: Taken) -> None:
    options = SnapKVOptions(window=64, kernel=5, pooling="avg", reducer="mean")
    past, reach = TOKENS - 64, 2
    for (query, key, value, scaling), weights in zip(taken.rows, taken.weights, strict=True):
        theirs = kvpress_scores(weights, taken.kv_heads, 64, 5)
        layer = LayerDescriptor(0, "full", taken.heads, taken.kv_heads, HEAD_DIM, HEAD_DIM, torch.float32, scaling)
        context = CompressContext(query_reader=[query].__getitem__)
        ours = SnapKVCompressor(options).score(layer, key, value, context)
        at = torch.arange(past)
        neighbours = torch.clamp(at + reach, max=past - 1) - torch.clamp(at - reach, min=0) + 1
        torch.testing.assert_close(ours[:, :past] / 64 * neighbours / 5, theirs, rtol=1e-5, atol=1e-8)
        inner = slice(reach, past - reach)
        for head in range(taken.kv_heads):  # away from the edges the ranking is the same
            order = torch.argsort(theirs[head, inner], descending=True)
            assert torch.equal(order, torch.argsort(ours[head, inner], descending=True))
