"""Which presses there are, by name, and why the others are not offered. Imports no kvpress."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PREFIX: Final = "kvpress-"


@dataclass(frozen=True)
class Press:
    """One press of kvpress.

    Attributes:
        class_name: in kvpress.
        summary: for listings.
        inner: class of the press that it wraps unless the option ``inner`` names another; empty for none.
        scorer: it ranks tokens, so VeriCache spends the budget; otherwise the press itself decides what survives.
        eager: needs attention weights, so the model attends eagerly for the pass (memory: tokens x tokens).
        ratio: it takes a budget.
    """

    class_name: str
    summary: str
    inner: str = ""
    scorer: bool = True
    eager: bool = False
    ratio: bool = True


PRESSES: Final[dict[str, Press]] = {
    "knorm": Press("KnormPress", "keeps keys of small norm"),
    "random": Press("RandomPress", "keeps tokens by lot"),
    "snapkv": Press("SnapKVPress", "attention of the last queries, pooled"),
    "tova": Press("TOVAPress", "attention of the last query, all heads alike"),
    "streaming-llm": Press("StreamingLLMPress", "sinks and the newest tokens"),
    "expected-attention": Press("ExpectedAttentionPress", "attention expected from future queries"),
    "observed-attention": Press("ObservedAttentionPress", "attention observed over the prompt", eager=True),
    "lag-kv": Press("LagKVPress", "deviation from the next partition"),
    "key-diff": Press("KeyDiffPress", "keys unlike the mean key"),
    "cur": Press("CURPress", "leverage scores of a CUR decomposition"),
    "leverage-score": Press("LeverageScorePress", "sketched leverage of keys"),
    "non-causal-attn": Press("NonCausalAttnPress", "attention inside chunks, in both directions"),
    "compactor": Press("CompactorPress", "leverage and non-causal attention"),
    "cap": Press("CapPress", "leverage of values weighted by alignment"),
    "critical-kv": Press("CriticalKVPress", "another score times the norm of projected values", inner="ExpectedAttentionPress"),
    "pyramid-kv": Press("PyramidKVPress", "SnapKV with budgets that fall by layer", scorer=False),
    "ada-kv": Press("AdaKVPress", "budgets shared by need among heads", inner="SnapKVPress", scorer=False),
    "chunk-kv": Press("ChunkKVPress", "whole chunks of neighbouring tokens", inner="SnapKVPress", scorer=False),
    "chunk": Press("ChunkPress", "the same share of every chunk", inner="KnormPress", scorer=False),
    "block": Press("BlockPress", "block after block, as KeyDiff asks for", inner="KeyDiffPress", scorer=False),
    "entropy-gated-chunk-kv": Press(
        "EntropyGatedChunkKVPress", "chunks whose length depends on entropy", inner="SnapKVPress", scorer=False
    ),
    "critical-ada-kv": Press("CriticalAdaKVPress", "AdaKV in two stages", inner="SnapKVPress", scorer=False),
    "sim-layer-kv": Press("SimLayerKVPress", "sinks and newest tokens in lazy layers", scorer=False, ratio=False),
}
"""Names after ``kvpress-``, all of which work without network."""

NOT_OFFERED: Final[dict[str, str]] = {
    "QFilterPress": "downloads learned filters",
    "KVzapPress": "downloads a learned model",
    "FastKVzipPress": "downloads learned gates",
    "LUKVPress": "downloads budget curves",
    "DuoAttentionPress": "downloads attention patterns",
    "RestoreKVPress": "downloads a learned model",
    "ExpectedAttentionStatsPress": "downloads query statistics",
    "KVzipPress": "runs the model through a chat template of its own; use the compressor kvzip",
    "KVgradPress": "needs gradients and a tokenizer folder",
    "KVComposePress": "replays the prompt and leaves attention switched; not adapted yet",
    "FinchPress": "changes the tokenizer and the model's embeddings",
    "DMSPress": "its threshold has no default; not adapted yet",
    "DecodingPress": "compresses while decoding, which VeriCache does not leave to a press",
    "PrefillDecodingPress": "compresses while decoding",
    "CompressionRatioDecodingPress": "compresses while decoding",
    "CAMPress": "merges while decoding",
    "KeyRerotationPress": "changes keys, so no row of the full cache survives",
    "MergingPress": "changes values, so no row of the full cache survives",
    "ThinKPress": "drops channels, not tokens",
    "ComposedPress": "is a list of presses; VeriCache composes by name, as in kvpress-tova+kivi",
    "PerLayerCompressionPress": "needs one ratio for every layer of one certain model",
}
"""Presses without a name here, and why."""

SHORTEST: Final[dict[str, tuple[tuple[str, ...], int]]] = {
    "SnapKVPress": (("window_size",), 1),
    "TOVAPress": ((), 2),
    "StreamingLLMPress": (("n_sink",), 1),
    "ExpectedAttentionPress": (("n_sink",), 1),
    "CapPress": (("n_sink",), 1),
    "LeverageScorePress": ((), 2),
    "CompactorPress": (("sink_size_start", "sink_size_end"), 2),
}
"""Fewest tokens that a press, or one derived from it, accepts: the sum of these attributes of it, plus a number."""
