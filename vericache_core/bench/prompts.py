"""Four long prompts of a chosen length: code, prose to sum up, questions about records, a JSON tool call.

The texts are made from the Python standard library (sources and the language reference, which ship with Python)
and from a fixed seed, so nothing is downloaded. They differ between Python versions: compare rows of one machine.
"""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from vericache_core.errors import ConfigError
from vericache_core.model.prompts import encode_prompt

Grammar = Literal["python", "json"]


@dataclass(frozen=True)
class BenchPrompt:
    """A prompt ready to run.

    Attributes:
        name: for the table.
        token_ids: the prompt.
        protected: spans that compressors must keep.
        grammar: what the answer should parse as, if anything.
    """

    name: str
    token_ids: tuple[int, ...]
    protected: tuple[tuple[int, int], ...] = ()
    grammar: Grammar | None = None


def build_prompts(tokenizer: Any, vocab_size: int, tokens: int, names: list[str] | None = None) -> list[BenchPrompt]:
    """The prompts, each of at most ``tokens`` tokens and close to it.

    Raises:
        ConfigError: an unknown name, no tokenizer, or a context too short for the instructions.
    """
    if tokenizer is None:
        raise ConfigError("the prompts are text, and this model came without a tokenizer")
    unknown = [name for name in names or () if name not in _RECIPES]
    if unknown:
        raise ConfigError(f"unknown prompt {unknown[0]!r}", hint=f"prompts: {', '.join(_RECIPES)}")
    return [_build(name, tokenizer, vocab_size, tokens) for name in names or _RECIPES]


def _build(name: str, tokenizer: Any, vocab_size: int, tokens: int) -> BenchPrompt:
    make, instruction, grammar = _RECIPES[name]
    ids: list[int] = tokenizer.encode(make(tokens), add_special_tokens=False)
    room = tokens
    for _ in range(8):  # decoding and encoding again may change the count by a token or two
        text = tokenizer.decode(ids[: max(room, 0)]) + "\n\n" + instruction
        chat = bool(getattr(tokenizer, "chat_template", None))
        found, protected = encode_prompt([{"role": "user", "content": text}] if chat else text, tokenizer, vocab_size)
        if len(found) <= tokens:
            return BenchPrompt(name, tuple(found), protected, grammar)
        room = min(room, len(ids)) - (len(found) - tokens)
        if room < 1:
            break
    raise ConfigError(f"a context of {tokens} tokens is too short for the prompt {name!r}", hint="try 512 or more")


def _code(tokens: int) -> str:
    import argparse
    import fractions
    import heapq
    import statistics
    import textwrap

    return _until(tokens, (inspect.getsource(module) for module in (heapq, textwrap, fractions, statistics, argparse)))


def _prose(tokens: int) -> str:
    from pydoc_data.topics import topics

    chosen = ("naming", "exceptions", "objects", "execmodel", "types", "imports", "typesfunctions", "try")
    first = [name for name in chosen if name in topics]
    return _until(tokens, (topics[name] for name in [*first, *sorted(set(topics) - set(first))]))


def _records(tokens: int) -> str:
    draw = random.Random(2416)  # noqa: S311  # a fixed text, no secret
    places = ("harbour", "orchard", "mill", "lighthouse", "quarry", "library", "bakery", "observatory", "foundry", "ferry")
    people = ("Ada", "Bruno", "Chiara", "Dmitri", "Elif", "Farid", "Greta", "Hugo", "Ines", "Jonas", "Kaja", "Lena")

    def line(number: int) -> str:
        return (
            f"Record {number}: {draw.choice(people)} keeps the {draw.choice(places)} on street {draw.randint(1, 99)}, "
            f"opened in {draw.randint(1801, 1999)}, visited by {draw.randint(100, 9999)} people last year.\n"
        )

    return "".join(line(number) for number in range(1, tokens // 4 + 2))


def _tools(tokens: int) -> str:
    draw = random.Random(1917)  # noqa: S311  # a fixed text, no secret
    verbs = ("create", "update", "delete", "find", "send", "archive", "export", "share")
    nouns = ("invoice", "meeting", "contact", "report", "ticket", "order", "reminder", "shipment", "photo", "account")
    fields = ("city", "date", "amount", "title", "priority", "owner", "language", "deadline", "color", "quantity")

    def tool(name: str) -> str:
        parameters = {field: {"type": draw.choice(("string", "integer"))} for field in draw.sample(fields, 3)}
        return json.dumps({"name": name, "description": f"Use it to {name.replace('_', ' ')}.", "parameters": parameters})

    names = [f"{verb}_{noun}" for noun in nouns for verb in verbs]
    weather = {"name": "get_weather", "parameters": {"city": {"type": "string"}, "date": {"type": "string"}}}
    lines = [json.dumps(weather), *(tool(name) for name in names)]
    while sum(map(len, lines)) < tokens * 16:
        lines += [tool(f"{name}_{len(lines)}") for name in names]
    return "Tools:\n" + "\n".join(lines)


def _until(tokens: int, texts: Any) -> str:
    """Texts in a row until there is surely enough."""
    found = ""
    for text in texts:
        found += text + "\n"
        if len(found) > tokens * 16:
            break
    return found


_RECIPES: dict[str, tuple[Callable[[int], str], str, Grammar | None]] = {
    "code": (
        _code,
        "Write a Python function that returns the largest of three numbers.",
        "python",
    ),
    "summary": (_prose, "Sum up the text above in a few sentences.", None),
    "question": (_records, "Who keeps the place of record 12, which place is it, and when was it opened?", None),
    "tool-call": (
        _tools,
        (
            "Question: What will the weather be in Oslo on 2026-05-17? Answer only with the call as JSON. "
            'Example: {"name": "find_order", "arguments": {"title": "Lamp", "amount": 3}}'
        ),
        "json",
    ),
}
