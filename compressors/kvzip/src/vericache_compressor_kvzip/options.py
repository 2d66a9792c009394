"""Options of ``kvzip`` and where their defaults come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from vericache_core import Budget, option


@dataclass(frozen=True, kw_only=True)
class KVzipOptions(Budget):
    """Options of :class:`~vericache_compressor_kvzip.compressor.KVzipCompressor`.

    The budget (``keep`` or ``keep_tokens``, 0.3 unless given, the authors' recommendation) counts tokens per KV
    head on average, outside the spans that the context protects, sinks included.
    """

    default_keep: ClassVar[float] = 0.3

    level: Literal["pair", "uniform"] = option("pair", help="one budget over all layers and heads, or the same for each")
    chunk: int = option(2000, help="context tokens that one scoring pass repeats", unit="tokens", ge=1)
    sinks: int = option(4, help="first tokens that always survive and that every scoring pass sees", unit="tokens", ge=0)
    request: Literal["text", "none"] = option("text", help="ask the model to repeat (needs a tokenizer), or just repeat")
    postfix: str = option("", help="text between request and repetition: how an answer starts in the chat template")
    scores_dir: str | None = option(None, help="directory that keeps scores, so that other budgets need no new passes")
