"""What a compressor may ask for besides the KV rows, without being coupled to a model.

A compressor declares :class:`Needs` up front, so that the runtime gathers only that during prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from vericache_core.errors import CompressorFault

T = TypeVar("T")

ScoreObserver = Callable[[int, Tensor, Tensor], None]
"""``(layer, queries [heads, rows, head_dim], keys [kv_heads, rows, head_dim])`` of an extra pass."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What to gather for :class:`CompressContext`.

    Attributes:
        queries: newest query rows to keep per layer (the observation window); 0 for none.
        attention_mass: column sums of the prompt's attention probabilities, streamed during prefill.
        scoring: the compressor runs extra passes through :meth:`CompressContext.score`.
        model: the compressor runs the ``transformers`` model itself, see :meth:`CompressContext.model`. Meant for
            adapters of other libraries: it couples a compressor to one kind of model and costs a prefill of its own.
    """

    queries: int = 0
    attention_mass: bool = False
    scoring: bool = False
    model: bool = False


@dataclass(frozen=True)
class CompressContext:
    """Facts and services for one ``compress`` or ``extend`` call. Anything not gathered raises by name.

    Attributes:
        seed: for compressors that draw numbers; never use a global generator.
        protected: half-open spans ``(start, stop)`` of the prompt that must survive (system prompt,
            chat-template prefix).
    """

    seed: int = 0
    protected: tuple[tuple[int, int], ...] = ()
    query_reader: Callable[[int], Tensor] | None = field(default=None, repr=False)
    mass_reader: Callable[[int], Tensor] | None = field(default=None, repr=False)
    score_runner: Callable[[Sequence[int], ScoreObserver], None] | None = field(default=None, repr=False)
    encoder: Callable[[str], list[int]] | None = field(default=None, repr=False)
    model_reader: Callable[[], Any] | None = field(default=None, repr=False)

    def queries(self, layer: int) -> Tensor:
        """``[heads, rows, head_dim]``: the newest query rows, oldest first, after rotary embedding.

        ``rows`` is ``min(needs.queries, tokens)``; the last row belongs to the last token of the prefix.
        """
        return _need(self.query_reader, "queries")(layer)

    def attention_mass(self, layer: int) -> Tensor:
        """float32 ``[heads, tokens]``: sum over prompt queries of the attention paid to each position."""
        return _need(self.mass_reader, "attention_mass")(layer)

    def score(self, token_ids: Sequence[int], observer: ScoreObserver) -> None:
        """Run ``token_ids`` as if they followed the prefix, on the full KV, and discard their rows.

        ``observer`` is called for each layer and block of rows, in order.
        """
        _need(self.score_runner, "scoring")(token_ids, observer)

    def model(self) -> Any:
        """The ``transformers`` model, attending as ``sdpa`` does; leave it exactly as it was.

        What it computes need not have the bits of the full KV: use it to choose tokens, never to make rows.
        """
        return _need(self.model_reader, "model")()

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text`` without special tokens.

        Raises:
            CompressorFault: the model came without a tokenizer.
        """
        if self.encoder is None:
            raise CompressorFault("this compressor needs a tokenizer", hint="pass a model that has one")
        return self.encoder(text)


def _need(service: T | None, name: str) -> T:
    if service is None:
        raise CompressorFault(f"the context holds no {name}", hint=f"declare it in the compressor's Needs ({name}=...)")
    return service
