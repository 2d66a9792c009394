"""Calls of tools told from content: what is a call, what is not, and that cutting the text changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vericache_core.serve.tool_calls import BareCalls, CallReader, Item, OnlyContent, TaggedCalls, ToolCall, read_calls

CITY = '{"city": "Oslo"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>'
WEATHER = ToolCall("weather", CITY)


def read(reader: CallReader, pieces: Sequence[str]) -> list[Item]:
    """What comes of ``pieces``, neighbouring content joined."""
    items: list[Item] = []
    for item in [*(item for piece in pieces for item in reader.feed(piece)), *reader.finish()]:
        if isinstance(item, str) and items and isinstance(items[-1], str):
            items[-1] += item
        else:
            items.append(item)
    return items


def tagged(text: str) -> list[Item]:
    return read(TaggedCalls(), [text])


def bare(text: str) -> list[Item]:
    return read(BareCalls(["weather"]), [text])


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("", []),
        ("no call", ["no call"]),
        (CALL, [WEATHER]),
        (f"Let me look.\n{CALL}", ["Let me look.", WEATHER]),
        (f"{CALL}\n{CALL}\n", [WEATHER, WEATHER]),
        (f"{CALL}\n\nDone. ", [WEATHER, "Done. "]),
        ('<tool_call>[{"name": "a"}, {"name": "b", "parameters": {}}]</tool_call>', [ToolCall("a", "{}"), ToolCall("b", "{}")]),
        ('<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}', [WEATHER]),  # the model stopped at the JSON's end
        ('<tool_call>{"name": "no_such_tool"}</tool_call>', [ToolCall("no_such_tool", "{}")]),
        (
            '<tool_call>{"name": "w", "arguments": {"text": "\\"</tool_call>"}}</tool_call>',
            [ToolCall("w", '{"text": "\\"</tool_call>"}')],
        ),
    ],
)
def test_tagged_calls(text: str, items: list[Item]) -> None:
    assert tagged(text) == items


@pytest.mark.parametrize(
    "body",
    [
        "",
        "weather(Oslo)",
        '{"name": "weather", "arguments": {"city": "Os',
        '{"name": "weather", "arguments": {"city": Oslo}}',
        '{"name": "weather", "arguments": "Oslo"}',
        '{"name": "weather", "arguments": null}',
        '{"name": "weather", "arguments": {"x": NaN}}',
        '{"name": "", "arguments": {}}',
        '{"name": 4, "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "weather"} and more',
        '[{"name": "weather"}, 4]',
        "[" * 100_000,
    ],
)
@pytest.mark.parametrize("close", ["</tool_call>", "</tool_call> and then", ""])
def test_what_is_no_call_is_content_byte_for_byte(body: str, close: str) -> None:
    text = f" Well. <tool_call>{body}{close}"
    assert tagged(text) == [text]
    assert read_calls(body) == []


def test_a_good_call_between_bad_ones_is_found() -> None:
    bad = "<tool_call>oops</tool_call>"
    assert tagged(f"{bad} {CALL} {bad}") == [bad, WEATHER, bad]


def test_arguments_are_what_the_model_wrote() -> None:
    """Reading them and writing them anew would change every one of these."""
    arguments = '{ "a":1.0e2,"b" : 12345678901234567890.10, "c": "\\u00e9é", "d": [1,2 , {"x":null}], "d": {} }'
    for spaced in ("", " \n"):
        call = f'{{{spaced}"arguments"{spaced}:{spaced}{arguments}{spaced},{spaced}"id": 3, "name": "f"{spaced}}}'
        assert tagged(f"<tool_call>{call}</tool_call>") == [ToolCall("f", arguments)]


def test_ids_are_nine_letters_and_digits_and_differ() -> None:
    first, second = (call.id for call in read_calls('[{"name": "a"}, {"name": "a"}]'))
    assert first != second
    assert all(len(number) == 9 and number.isalnum() for number in (first, second))


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ('{"name": "weather", "parameters": {"city": "Oslo"}}', [WEATHER]),
        (' [{"name": "weather", "arguments": {"city": "Oslo"}}]\n', [WEATHER]),
        ("It rains. {}", ["It rains. {}"]),
        (' {"name": "Ada", "age": 36}', [' {"name": "Ada", "age": 36}']),  # JSON that somebody asked for
        ('{"name": "weather"', ['{"name": "weather"']),
        ("  ", ["  "]),
    ],
)
def test_bare_calls(text: str, items: list[Item]) -> None:
    assert bare(text) == items


def test_content_is_given_out_as_soon_as_it_cannot_be_part_of_a_call() -> None:
    reader = TaggedCalls()
    assert reader.feed("a < b <tool") == ["a < b"]
    assert reader.feed("box> ") == [" <toolbox>"]
    assert reader.feed("<tool_call>") == []
    assert reader.feed('{"name": "f"}') == []
    assert reader.feed("</tool_call>") == [ToolCall("f", "{}")]
    assert BareCalls([]).feed("Hello") == ["Hello"]
    assert OnlyContent().feed(CALL) == [CALL]


PARTS = st.sampled_from(
    [CALL, "<tool_call>", "</tool_call>", "<tool", '{"name": "weather"}', '"', "\\", " ", "\n", "text", "{", "}", "[", "]"]
)


@given(parts=st.lists(PARTS, max_size=12), data=st.data())
def test_how_the_text_is_cut_changes_nothing(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(TaggedCalls(), pieces) == tagged(text)
    assert read(BareCalls(["weather"]), pieces) == bare(text)


@given(parts=st.lists(PARTS, max_size=12))
def test_only_calls_and_the_white_space_around_them_are_left_out(parts: list[str]) -> None:
    text, at = "".join(parts), 0
    for item in tagged(text):
        begin = text.index("<tool_call>" if isinstance(item, ToolCall) else item, at)
        assert isinstance(item, ToolCall) or not text[at:begin].strip()
        at = begin
        if isinstance(item, str):
            at += len(item)
        else:
            end = text.find("</tool_call>", at)
            at = len(text) if end < 0 else end + len("</tool_call>")
    assert not text[at:].strip()
