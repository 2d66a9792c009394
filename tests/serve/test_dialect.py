"""Which parser goes with which chat template."""

from __future__ import annotations

import pytest

from tests.serve.served import CALLING, TEMPLATE, byte_tokenizer
from vericache_core.serve.dialect import dialect_of
from vericache_core.serve.tool_calls import BareCalls, TaggedCalls

BARE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}: {% if m.tool_calls %}"
    """{{ '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}"""
    "{{ m.tool_calls[0].function.arguments | tojson + '}' }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
LISTED = BARE.replace('{"name', '[{"name').replace("'}'", "'}]'").replace("parameters", "arguments")


def dialect(template: str | None, **special: list[str]) -> tuple[object, str]:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.add_special_tokens({"additional_special_tokens": special.get("special", [])})
    found = dialect_of(tokenizer)
    return found.reader, found.name


def test_the_format_is_the_templates() -> None:
    assert dialect(CALLING) == (TaggedCalls, "tagged JSON")
    assert dialect(BARE) == (BareCalls, "bare JSON")
    assert dialect(LISTED) == (BareCalls, "bare JSON")


def test_a_tag_that_decoding_leaves_out_is_not_waited_for() -> None:
    """Mistral writes a special token before its list, which is not in the text: what is left is a bare list."""
    assert dialect(LISTED.replace("[{", "[CALLS][{"), special=["[CALLS]"]) == (BareCalls, "bare JSON")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "there is no chat template"),
        (TEMPLATE, "the chat template has no place for them"),
        ("{{ raise_exception('no tools') if tools else 'x' }}", "the chat template refuses them: no tools"),
        ("{{ tools[0].nothing.more if tools else 'x' }}", "the chat template refuses them"),
        ("{{ tools[0].name + 4 if tools else 'x' }}", "the chat template refuses them"),
        (CALLING.replace("<tool_call>", "<call>"), "there is no parser of calls as the chat template writes them: '<call>"),
    ],
)
def test_why_there_are_no_tools(template: str | None, words: str) -> None:
    reader, name = dialect(template)
    assert reader is None
    assert words in name
