"""Calls of tools in the text that a model writes: told from content piece by piece, as a stream brings it.

A reader takes text in pieces of any size and gives out content and calls; how the text was cut changes nothing but
when they come. What looks like a call and is none (broken JSON, no name, arguments that are no object) is content, byte
for byte: a caller sees it rather than an answer from which something is missing. A call comes out whole, as only its
end tells that it is one.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
_SPACE: Final = re.compile(r"\s*")
_ESCAPED: Final = re.compile(r"\\.", re.DOTALL)


def _new_id() -> str:
    return uuid.uuid4().hex[:9]  # nine letters and digits: Mistral's templates take no other


@dataclass(frozen=True)
class ToolCall:
    """A call that a model asks for.

    Attributes:
        name: of the function.
        arguments: a JSON object as text, byte for byte as the model wrote it.
        id: what the tool's answer will name.
    """

    name: str
    arguments: str
    id: str = field(default_factory=_new_id, compare=False)


Item: TypeAlias = str | ToolCall


class CallReader(Protocol):
    """Tells calls from content in one answer."""

    def feed(self, text: str) -> list[Item]:
        """What is certain with ``text`` behind what came before."""

    def finish(self) -> list[Item]:
        """The rest, when no more text comes."""


ReaderMaker: TypeAlias = Callable[[Collection[str]], CallReader]
"""Names of the tools of a request -> a reader of one of its answers."""


class TaggedCalls:
    """Calls between ``<tool_call>`` and ``</tool_call>``, one object or a list of them: Hermes, Qwen, SmolLM.

    The white space around a call is no content. A last call whose end is missing counts when its JSON is whole.
    A name that no tool has is handed on: who wrote the tags meant a call, and the caller can tell the model.
    """

    def __init__(self, _names: Collection[str] = ()) -> None:
        self._held = ""
        self._after_call = False

    def feed(self, text: str) -> list[Item]:
        self._held += text
        found: list[Item] = []
        while (end := self._block_end()) is not None:
            begin = self._held.index(OPEN)
            self._take(begin, end, read_calls(self._held[begin + len(OPEN) : end - len(CLOSE)]), found)
        if OPEN not in self._held:
            self._release(len(self._held) - _undecided(self._held), found)
        return found

    def finish(self) -> list[Item]:
        found: list[Item] = []
        begin = self._held.find(OPEN)
        if begin >= 0:
            self._take(begin, len(self._held), read_calls(self._held[begin + len(OPEN) :]), found)
        self._release(len(self._held), found)
        return found

    def _block_end(self) -> int | None:
        """Where the first block ends; a closing tag inside a JSON string is part of that string."""
        begin = self._held.find(OPEN)
        at = -1 if begin < 0 else self._held.find(CLOSE, begin)
        while at >= 0 and _inside_string(self._held[begin + len(OPEN) : at]):
            at = self._held.find(CLOSE, at + 1)
        return None if at < 0 else at + len(CLOSE)

    def _take(self, begin: int, end: int, calls: list[ToolCall], found: list[Item]) -> None:
        """Move the block ``[begin, end)`` and what is before it out: as ``calls``, or as content if there are none."""
        if not calls:
            self._release(end, found)
            return
        before = self._held[:begin].rstrip()
        self._held = before + self._held[end:]
        self._release(len(before), found)
        found += calls
        self._after_call = True

    def _release(self, upto: int, found: list[Item]) -> None:
        """Move content out."""
        content, self._held = self._held[:upto], self._held[upto:]
        if self._after_call:
            content = content.lstrip()
        if content:
            found.append(content)
            self._after_call = False


class BareCalls:
    """Calls as the whole answer, one object or a list of them: Llama 3, Mistral.

    Nothing but the name tells such a call from JSON that somebody asked for, so it must be that of a tool.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._held = ""
        self._is_content = False

    def feed(self, text: str) -> list[Item]:
        self._held += text
        begin = self._held.lstrip()[:1]
        if begin and begin not in "{[":
            self._is_content = True
        return self._release() if self._is_content else []

    def finish(self) -> list[Item]:
        calls = [] if self._is_content else read_calls(self._held)
        if calls and all(call.name in self._names for call in calls):
            return [*calls]
        return self._release()

    def _release(self) -> list[Item]:
        content, self._held = self._held, ""
        return [content] if content else []


class OnlyContent:
    """Of a request without tools."""

    def feed(self, text: str) -> list[Item]:
        return [text] if text else []

    def finish(self) -> list[Item]:
        return []


def read_calls(text: str) -> list[ToolCall]:
    """The calls that ``text`` is, one JSON object or a list of them; none if any of it is something else.

    A call is an object with a ``name`` and an object as ``arguments`` (Llama's word: ``parameters``); without
    arguments they are empty. What else it holds is passed over.
    """
    try:
        begin = _skip(text, 0)
        end = _value_end(text, begin)
        if text[end:].strip():
            return []
        whole = text[begin:end]
        return [_read_call(part) for part in (_elements(whole) if whole.startswith("[") else [whole])]
    except (ValueError, RecursionError):
        return []


def _read_call(text: str) -> ToolCall:
    """The call that a JSON value is; raises ValueError for any other value."""
    if not text.startswith("{"):
        raise ValueError("no object")
    name: Any = None
    arguments = "{}"
    for key, raw in _members(text):
        if key == "name":
            name = json.loads(raw)
        elif key in {"arguments", "parameters"}:
            arguments = raw
    if not isinstance(name, str) or not name or not arguments.startswith("{"):
        raise ValueError("no name, or arguments that are no object")
    return ToolCall(name, arguments)


# Python's json gives values and not where they stand, and writing arguments anew would change them (numbers, spaces,
# escapes, keys that come twice). These walk over JSON that is known to be valid.


def _members(text: str) -> Iterator[tuple[str, str]]:
    """Keys of a JSON object, and the text of their values."""
    at = _skip(text, 1)
    while text[at] != "}":
        key, at = _JSON.raw_decode(text, at)
        begin = _skip(text, _skip(text, at) + 1)  # behind the colon
        end = _value_end(text, begin)
        yield key, text[begin:end]
        at = _next(text, end)


def _elements(text: str) -> Iterator[str]:
    """The text of the elements of a JSON list."""
    at = _skip(text, 1)
    while text[at] != "]":
        end = _value_end(text, at)
        yield text[at:end]
        at = _next(text, end)


def _next(text: str, end: int) -> int:
    """Where the next part begins behind one that ends at ``end``, or the closing bracket is."""
    at = _skip(text, end)
    return _skip(text, at + 1) if text[at] == "," else at


def _value_end(text: str, at: int) -> int:
    """Where the JSON value that begins at ``at`` ends; ValueError if none does."""
    return _JSON.raw_decode(text, at)[1]


def _only_python(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_JSON: Final = json.JSONDecoder(parse_constant=_only_python)


def _skip(text: str, at: int) -> int:
    """Where the white space that begins at ``at`` ends."""
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _inside_string(text: str) -> bool:
    """Whether JSON breaks off inside a string at the end of ``text``."""
    return _ESCAPED.sub("", text).count('"') % 2 == 1


def _undecided(text: str) -> int:
    """Length of the longest suffix that may belong to a call: white space, then the beginning of a tag."""
    partial = next((n for n in range(min(len(OPEN) - 1, len(text)), 0, -1) if text.endswith(OPEN[:n])), 0)
    return len(text) - len(text[: len(text) - partial].rstrip())
