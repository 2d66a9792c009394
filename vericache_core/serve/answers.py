"""Answers of the OpenAI API: whole ones, pieces of a stream, and errors. Everything here returns what JSON knows."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from vericache_core.errors import UsageError, VeriCacheError
from vericache_core.runtime.admission import QueueFull
from vericache_core.runtime.output import TokenLogprobs
from vericache_core.serve.asks import UnknownModelError
from vericache_core.serve.logprobs import LogprobWriter, TokenTexts
from vericache_core.serve.tool_calls import CallReader, OnlyContent, ToolCall

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
        texts: of its tokens.
        reader: makes what tells calls of tools from text, one for each choice.
        n: choices for each prompt.
    """

    chat: bool
    model: str
    texts: TokenTexts
    reader: Callable[[], CallReader] = OnlyContent
    n: int = 1
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """All choices at once."""
        choices = [self._whole(index, output) for index, output in enumerate(outputs)]
        return {**self._head(stream=False), "choices": choices, **self._counts(outputs)}

    def choice(self, index: int) -> ChoiceStream:
        """Writes the choice ``index`` as a stream."""
        return ChoiceStream(self, index)

    def _whole(self, index: int, output: RequestOutput) -> dict[str, Any]:
        reader = self.reader()
        items = [*reader.feed(output.text), *reader.finish()]
        content = "".join(item for item in items if isinstance(item, str))
        calls = [_call(item) for item in items if isinstance(item, ToolCall)]
        said: dict[str, Any] = {"text": content}
        if self.chat:
            called = {"tool_calls": calls} if calls else {}
            said = {"message": {"role": "assistant", "content": content or None if calls else content, **called}}
        logprobs = None if output.logprobs is None else LogprobWriter(self.texts, self.chat).write(output.logprobs)
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": _reason(output, bool(calls))}

    def usage(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """What all choices took, behind the last of them."""
        return {**self._head(stream=True), "choices": [], **self._counts(outputs)}

    def chunk(self, index: int, said: dict[str, Any], reason: str | None) -> dict[str, Any]:
        """A piece of a choice in a stream: ``said`` holds its ``delta`` or ``text``."""
        choice = {"index": index, **said, "logprobs": None, "finish_reason": reason}
        return {**self._head(stream=True), "choices": [choice]}

    def _head(self, *, stream: bool) -> dict[str, Any]:
        kind = "chat.completion" + (".chunk" if stream else "") if self.chat else "text_completion"
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _counts(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """``usage``, each prompt counted once, and under our own name what was drafted and accepted."""
        prompt = sum(len(output.prompt_token_ids) for output in outputs[:: self.n])
        answer = sum(len(output.token_ids) for output in outputs)
        usage = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
        return {"usage": usage, "vericache": [_drafts(output) for output in outputs]}


class ChoiceStream:
    """Writes one choice as chunks: who speaks, text and calls as they come, why it ended."""

    def __init__(self, writer: Writer, index: int) -> None:
        self._writer, self._index = writer, index
        self._reader, self._logprobs = writer.reader(), LogprobWriter(writer.texts, writer.chat)
        self._calls = 0

    def begin(self) -> list[dict[str, Any]]:
        """What a choice begins with: in a chat, who speaks."""
        return [self._chunk({"role": "assistant", "content": ""})] if self._writer.chat else []

    def more(self, text: str, logprobs: Sequence[TokenLogprobs] = ()) -> list[dict[str, Any]]:
        """What more of its text brings, and ``logprobs`` of its tokens, which may come before their text is certain."""
        chunks = [self._item(item) for item in self._reader.feed(text)]
        if logprobs:
            chunks = chunks or [self._item("")]
            chunks[0]["choices"][0]["logprobs"] = self._logprobs.write(logprobs)
        return chunks

    def end(self, output: RequestOutput) -> list[dict[str, Any]]:
        """The end, when all of the text was given."""
        rest = [self._item(item) for item in self._reader.finish()]
        return [*rest, self._chunk({} if self._writer.chat else "", _reason(output, self._calls > 0))]

    def _item(self, item: str | ToolCall) -> dict[str, Any]:
        if isinstance(item, ToolCall):
            self._calls += 1
            return self._chunk({"tool_calls": [{"index": self._calls - 1, **_call(item)}]})
        return self._chunk({"content": item} if self._writer.chat else item)

    def _chunk(self, said: dict[str, Any] | str, reason: str | None = None) -> dict[str, Any]:
        return self._writer.chunk(self._index, {"delta" if self._writer.chat else "text": said}, reason)


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _reason(output: RequestOutput, calls: bool) -> str:
    """Why a choice ended; one that was cut off is not said to be whole because it holds a call."""
    return "tool_calls" if calls and output.finish_reason == "stop" else output.finish_reason


def _drafts(output: RequestOutput) -> dict[str, Any]:
    metrics = output.metrics
    return {
        "compressor": metrics.compressor,
        "mode": metrics.mode,
        "drafted": metrics.drafted,
        "accepted": metrics.accepted,
        "rounds": metrics.rounds,
        "identical": metrics.identical,
    }
