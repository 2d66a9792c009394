"""Answers of the OpenAI API: whole ones, pieces of a stream, and errors. Everything here returns what JSON knows."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from vericache_core.errors import UsageError, VeriCacheError
from vericache_core.runtime.admission import QueueFull
from vericache_core.serve.asks import UnknownModelError

if TYPE_CHECKING:
    from vericache_core.outputs import RequestOutput


class UnauthorizedError(UsageError):
    """A call shows no token that is known here."""


class TooLargeError(UsageError):
    """A body is longer than is read."""


class NotJsonError(UsageError):
    """A body is not said to be JSON."""


class StoppingError(VeriCacheError):
    """The server takes nothing new, or gave up what ran."""


_STATUS: Final = (
    (UnauthorizedError, 401),
    (UnknownModelError, 404),
    (TooLargeError, 413),
    (NotJsonError, 415),
    (UsageError, 400),
    (QueueFull, 429),
    (StoppingError, 503),
)
"""The first that fits counts; anything else is 500."""
_TYPES: Final = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "unavailable_error"}


def status_of(error: VeriCacheError) -> int:
    """HTTP status of an error."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def error_body(error: VeriCacheError) -> dict[str, Any]:
    """The error as the OpenAI API writes one; its message has cause and hint."""
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": str(error), "type": kind, "param": None, "code": type(error).__name__}}


@dataclass(frozen=True)
class Writer:
    """Writes the answers to one call.

    Args:
        chat: of ``/v1/chat/completions``.
        model: the name that is served.
    """

    chat: bool
    model: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """All choices at once."""
        choices = []
        for index, output in enumerate(outputs):
            text = {"message": {"role": "assistant", "content": output.text}} if self.chat else {"text": output.text}
            choices.append({"index": index, **text, "logprobs": None, "finish_reason": output.finish_reason})
        return {**self._head(stream=False), "choices": choices, **_counts(outputs)}

    def begin(self, index: int) -> dict[str, Any] | None:
        """What a choice begins with: in a chat, who speaks."""
        return self._choice(index, {"delta": {"role": "assistant", "content": ""}}, None) if self.chat else None

    def piece(self, index: int, text: str) -> dict[str, Any]:
        """More text of a choice."""
        return self._choice(index, {"delta": {"content": text}} if self.chat else {"text": text}, None)

    def end(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """The end of a choice, whose text has been sent."""
        return self._choice(index, {"delta": {}} if self.chat else {"text": ""}, output.finish_reason)

    def usage(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """What all choices took, behind the last of them."""
        return {**self._head(stream=True), "choices": [], **_counts(outputs)}

    def _choice(self, index: int, text: dict[str, Any], reason: str | None) -> dict[str, Any]:
        choice = {"index": index, **text, "logprobs": None, "finish_reason": reason}
        return {**self._head(stream=True), "choices": [choice]}

    def _head(self, *, stream: bool) -> dict[str, Any]:
        kind = "chat.completion" + (".chunk" if stream else "") if self.chat else "text_completion"
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}


def _counts(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """``usage``, and under our own name what was drafted and accepted."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    answer = sum(len(output.token_ids) for output in outputs)
    drafts = [
        {
            "compressor": output.metrics.compressor,
            "mode": output.metrics.mode,
            "drafted": output.metrics.drafted,
            "accepted": output.metrics.accepted,
            "rounds": output.metrics.rounds,
            "identical": output.metrics.identical,
        }
        for output in outputs
    ]
    usage = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
    return {"usage": usage, "vericache": drafts}
