"""How a model writes calls of tools, found out by its own chat template: it renders one, and who can read it back reads.

The template is asked rather than the model's name: it is what the model was trained with, and it comes along with every
model. What it renders goes through the tokenizer and back, as an answer does, so that tags that decoding leaves out
are missing here too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from vericache_core.errors import PromptError
from vericache_core.model.prompts import Chat, render_chat
from vericache_core.serve.tool_calls import BareCalls, ReaderMaker, TaggedCalls, ToolCall

_FORMATS: Final[tuple[tuple[str, ReaderMaker], ...]] = (("tagged JSON", TaggedCalls), ("bare JSON", BareCalls))
_NAME: Final = "probe_tool"
_PROBE: Final = {"type": "function", "function": {"name": _NAME, "arguments": {"probe_key": "probe value"}}, "id": "probe0000"}
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "a probe",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string"}}},
    },
}
_QUESTION: Final = {"role": "user", "content": "a question"}


@dataclass(frozen=True)
class Dialect:
    """How a model is told of tools and calls them.

    Attributes:
        reader: of its calls; None when it knows no tools, or its calls cannot be read.
        name: of the format, or why there is none.
    """

    reader: ReaderMaker | None
    name: str


NO_TOOLS: Final = Dialect(None, "there is no chat template")


def dialect_of(tokenizer: Any) -> Dialect:
    """The dialect that the chat template of ``tokenizer`` speaks."""
    if not getattr(tokenizer, "chat_template", None):
        return NO_TOOLS
    try:
        without = render_chat(Chat([_QUESTION]), tokenizer)
        asked = render_chat(Chat([_QUESTION], [_TOOL]), tokenizer)
        call = {"role": "assistant", "content": "", "tool_calls": [_PROBE]}
        called = render_chat(Chat([_QUESTION, call], [_TOOL]), tokenizer, answer=False)
    except PromptError as error:
        return Dialect(None, f"the chat template refuses them: {error.cause}")
    if _NAME not in asked or asked == without:
        return Dialect(None, "the chat template has no place for them")
    question = render_chat(Chat([_QUESTION], [_TOOL]), tokenizer, answer=False)
    answer = called.removeprefix(asked if called.startswith(asked) else question)
    ids = tokenizer.encode(answer, add_special_tokens=False)
    written = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    for name, reader in _FORMATS:
        if _calls(reader, written) == [ToolCall(_NAME, '{"probe_key": "probe value"}')]:
            return Dialect(reader, name)
    return Dialect(None, f"there is no parser of calls as the chat template writes them: {written.strip()[:80]!r}")


def _calls(make: ReaderMaker, written: str) -> list[ToolCall]:
    reader = make([_NAME])
    return [item for item in (*reader.feed(written), *reader.finish()) if isinstance(item, ToolCall)]
