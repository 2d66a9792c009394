"""Which presses there are, by name, and why the others are not offered. Imports no kvpress."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

PREFIX: Final = "kvpress-"


@dataclass(frozen=True)
class Press:
    """One press of kvpress.

    Attributes:
        class_name: in kvpress.
        summary: for listings.
        inner: class of the press that it wraps unless the option ``inner`` names another; empty for none.
        route: how survivors are had. ``rank``: it scores tokens and VeriCache spends the budget; otherwise the press
            decides. ``drop``: it drops tokens from one layer at a time. ``reconstruct``: it scores by passes that
            repeat the prompt, as KVzip does. ``replay``: it scores by one more pass over the prompt, as KVCompose does.
        budget: what a budget becomes: a ``ratio``, one for each of the ``stages`` of a chain, one for each of the
            ``layers``, a ``threshold`` of scores, or nothing.
        eager: needs attention weights, so the model attends eagerly for the pass (memory: tokens x tokens).
    """

    class_name: str
    summary: str
    inner: str = ""
    route: Literal["rank", "drop", "reconstruct", "replay"] = "rank"
    budget: Literal["ratio", "stages", "layers", "threshold", "none"] = "ratio"
    eager: bool = False


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
    "pyramid-kv": Press("PyramidKVPress", "SnapKV with budgets that fall by layer", route="drop"),
    "ada-kv": Press("AdaKVPress", "budgets shared by need among heads", inner="SnapKVPress", route="drop"),
    "chunk-kv": Press("ChunkKVPress", "whole chunks of neighbouring tokens", inner="SnapKVPress", route="drop"),
    "chunk": Press("ChunkPress", "the same share of every chunk", inner="KnormPress", route="drop"),
    "block": Press("BlockPress", "block after block, as KeyDiff asks for", inner="KeyDiffPress", route="drop"),
    "entropy-gated-chunk-kv": Press(
        "EntropyGatedChunkKVPress", "chunks whose length depends on entropy", inner="SnapKVPress", route="drop"
    ),
    "critical-ada-kv": Press("CriticalAdaKVPress", "AdaKV in two stages", inner="SnapKVPress", route="drop"),
    "sim-layer-kv": Press("SimLayerKVPress", "sinks and newest tokens in lazy layers", route="drop", budget="none"),
    "finch": Press("FinchPress", "attention of the question, weighted by reach; keys stay as they are", route="drop"),
    "dms": Press("DMSPress", "scores above a threshold, and a window", inner="KnormPress", route="drop", budget="threshold"),
    "per-layer": Press(
        "PerLayerCompressionPress", "a ratio for each layer", inner="ExpectedAttentionPress", route="drop", budget="layers"
    ),
    "composed": Press(
        "ComposedPress", "one press after another", inner="ExpectedAttentionPress+KnormPress", route="drop", budget="stages"
    ),
    "kvzip": Press("KVzipPress", "attention while the prompt is repeated", route="reconstruct"),
    "kvgrad": Press("KVgradPress", "the same times gradients", route="reconstruct"),
    "kvcompose": Press("KVComposePress", "attention of a second reading, budgets by layer", route="replay", eager=True),
}
"""Names after ``kvpress-``, all of which work without network."""

DOWNLOAD: Final = "needs a download"
REWRITES: Final = "rewrites rows, so no exact surviving rows exist"
DECODING: Final = "compresses while decoding, which VeriCache leaves to no press"

NOT_OFFERED: Final[dict[str, tuple[str, str]]] = {
    "QFilterPress": (DOWNLOAD, "learned filters"),
    "KVzapPress": (DOWNLOAD, "a learned model"),
    "FastKVzipPress": (DOWNLOAD, "learned gates"),
    "LUKVPress": (DOWNLOAD, "budget curves"),
    "DuoAttentionPress": (DOWNLOAD, "attention patterns"),
    "RestoreKVPress": (DOWNLOAD, "a learned model"),
    "ExpectedAttentionStatsPress": (DOWNLOAD, "query statistics"),
    "KeyRerotationPress": (REWRITES, "keys are rotated to new positions; the press that it wraps chooses, by its own name"),
    "MergingPress": (REWRITES, "values of dropped tokens are mixed in; the press that it wraps chooses, by its own name"),
    "ThinKPress": (REWRITES, "channels of keys become zero; it drops no token"),
    "CAMPress": (DECODING, "and mixes values"),
    "DecodingPress": (DECODING, "with any scorer"),
    "PrefillDecodingPress": (DECODING, "after another press in prefill, which has a name of its own"),
    "CompressionRatioDecodingPress": (DECODING, "to a share of what came before"),
}
"""Presses without a name here: why, and in detail."""

SHORTEST: Final[dict[str, tuple[tuple[str, ...], int]]] = {
    "SnapKVPress": (("window_size",), 1),
    "FinchPress": (("window_size",), 1),
    "TOVAPress": ((), 2),
    "StreamingLLMPress": (("n_sink",), 1),
    "ExpectedAttentionPress": (("n_sink",), 1),
    "CapPress": (("n_sink",), 1),
    "LeverageScorePress": ((), 2),
    "CompactorPress": (("sink_size_start", "sink_size_end"), 2),
}
"""Fewest tokens that a press, or one derived from it, accepts: the sum of these attributes of it, plus a number."""
