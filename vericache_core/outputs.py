"""What callers of the engine hold in their hands: a submitted request, how far it is, pieces of its answer, its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vericache_core.errors import VeriCacheError
from vericache_core.runtime.metrics import RequestMetrics
from vericache_core.runtime.output import TokenLogprobs
from vericache_core.runtime.request import Request


@dataclass(frozen=True)
class RequestOutput:
    """Result of one request.

    Attributes:
        token_ids: committed tokens, an ending id included.
        text: their text, cut before a stop string.
        finish_reason: ``stop``, ``length``, ``cancelled`` or ``error``.
        stop_reason: the ending id or stop string, if one ended it.
        logprobs: per token, when asked for.
        metrics: what it cost.
        error: why, when ``finish_reason`` is ``error``; the tokens before it are right.
        logits: ``[tokens, vocab]`` on the CPU in the model's dtype, when recording was asked for.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    stop_reason: int | str | None
    metrics: RequestMetrics
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: VeriCacheError | None = None
    logits: Tensor | None = None


@dataclass(frozen=True)
class StreamChunk:
    """A piece of a streamed answer: new text, new token ids, and the whole output at the end."""

    text: str
    token_ids: tuple[int, ...]
    output: RequestOutput | None = None


class Job:
    """A submitted request; see :meth:`Engine.submit`."""

    def __init__(
        self, request: Request, step: Callable[[], object], drop: Callable[[], None], output: Callable[[], RequestOutput]
    ) -> None:
        self._request, self._step, self._drop, self._output = request, step, drop, output
        self._result: RequestOutput | None = None
        self._told = 0  # tokens whose log probabilities were taken

    @property
    def number(self) -> int:
        """Unique in this process."""
        return self._request.number

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self._request.finished

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens committed so far; they never change."""
        return tuple(self._request.generated)

    def take_text(self) -> str:
        """The text that became certain since the last call."""
        return self._request.output.take_delta()

    def take_logprobs(self) -> tuple[TokenLogprobs, ...]:
        """Log probabilities of the tokens committed since the last call; none unless they were asked for."""
        fresh = tuple((self._request.output.logprobs or ())[self._told :])
        self._told += len(fresh)
        return fresh

    def cancel(self) -> None:
        """End it; what was committed stays."""
        self._drop()

    def result(self) -> RequestOutput:
        """Run steps until it is finished and return its output."""
        while not self._request.finished:
            self._step()
        if self._result is None:  # once: an answer is audited when it is handed out first
            self._result = self._output()
        return self._result


def output_of(request: Request, vocab_size: int, dtype: torch.dtype) -> RequestOutput:
    """The result of a request as it stands; recorded logits have ``vocab_size`` columns of ``dtype``."""
    output = request.output
    logits = None
    if request.logits is not None:
        logits = torch.stack(request.logits) if request.logits else torch.empty((0, vocab_size), dtype=dtype)
    return RequestOutput(
        prompt_token_ids=tuple(request.tokens[: request.prompt_tokens]),
        token_ids=tuple(output.token_ids),
        text=output.text,
        finish_reason=str(output.finish_reason),
        stop_reason=output.stop_reason,
        metrics=request.metrics,
        logprobs=None if output.logprobs is None else tuple(output.logprobs),
        error=request.error,
        logits=logits,
    )


def progress_of(requests: Sequence[Request]) -> tuple[int, int, int, int]:
    """Prompt rows done, prompt rows, new tokens, and the most new tokens, of all ``requests`` together."""
    return (
        sum(min(request.full.tokens, request.prompt_tokens) for request in requests),
        sum(request.prompt_tokens for request in requests),
        sum(len(request.generated) for request in requests),
        sum(request.params.max_new_tokens for request in requests),
    )
