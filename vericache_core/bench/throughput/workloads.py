"""What is decoded: prompts whose continuations are easy or hard to predict, their lengths, and where the full KV lives.

Texts come from the Python standard library (sources and the language reference), so nothing is downloaded. They differ
between Python versions: compare rows of one machine.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from vericache_core.errors import ConfigError, UsageError
from vericache_core.plugins.fields import did_you_mean

Kind = Literal["easy", "hard"]


@dataclass(frozen=True)
class Prompt:
    """Token ids, and whether their continuation is easy to predict."""

    token_ids: tuple[int, ...]
    kind: Kind


@dataclass(frozen=True)
class Workload:
    """Requests that are decoded side by side.

    Attributes:
        name: for the table, with the context where several are measured.
        context: tokens of the longest prompt.
        tier: where VeriCache's full KV lives; ``None`` leaves it to the options of the run.
        budget_share: cap on device KV as a share of what the full KV of all requests needs; ``None`` for no cap.
        slowdown: the link to ``tier`` is this many times slower than memory; ``None`` for as fast as it is.
    """

    name: str
    prompts: tuple[Prompt, ...]
    new_tokens: int
    context: int
    tier: Literal["host", "disk"] | None = None
    budget_share: float | None = None
    slowdown: int | None = None


@dataclass(frozen=True)
class Shape:
    """How a workload is made: shares of the longest context for its first and last request, and kinds in turn."""

    first: float
    last: float
    kinds: tuple[Kind, ...]
    geometric: bool = False
    tier: Literal["host", "disk"] | None = None
    budget_share: float | None = None
    slowdown: int | None = None


BOTH: Final[tuple[Kind, ...]] = ("easy", "hard")
SHAPES: Final = {
    "long": Shape(0.75, 1.0, BOTH),
    "ragged": Shape(1 / 16, 1.0, BOTH, geometric=True),
    "mixed": Shape(0.5, 0.5, BOTH),
    "easy": Shape(0.5, 0.5, ("easy",)),
    "hard": Shape(0.5, 0.5, ("hard",)),
    "short": Shape(1 / 64, 1 / 64, BOTH),
    "slow-disk": Shape(0.75, 1.0, BOTH, tier="disk", budget_share=0.25),
    "slow-host-30": Shape(0.75, 1.0, BOTH, tier="host", budget_share=0.25, slowdown=30),
    "slow-host-60": Shape(0.75, 1.0, BOTH, tier="host", budget_share=0.25, slowdown=60),
}
GROUPS: Final = {"slow-tier": ("slow-disk", "slow-host-30", "slow-host-60")}
DEFAULT: Final = ("long", "ragged", "mixed", "slow-tier", "short")
SHORTEST: Final = 8


def names_of(wanted: Sequence[str]) -> list[str]:
    """Names with groups opened, each once.

    Raises:
        UsageError: an unknown name.
    """
    found: dict[str, None] = {}
    for name in wanted:
        if name not in SHAPES and name not in GROUPS:
            near = did_you_mean(name, [*SHAPES, *GROUPS])
            suffix = f"; did you mean {near!r}?" if near else ""
            raise UsageError(f"unknown workload {name!r}{suffix}", hint=f"workloads: {', '.join([*SHAPES, *GROUPS])}")
        found |= dict.fromkeys(GROUPS.get(name, (name,)))
    return list(found)


def build_workloads(
    tokenizer: Any, names: Sequence[str], requests: int, contexts: Sequence[int], new_tokens: int
) -> list[Workload]:
    """Every named workload at every context, the longest prompt of each having that many tokens.

    Raises:
        ConfigError: the model came without a tokenizer.
    """
    if tokenizer is None:
        raise ConfigError("the prompts are text, and this model came without a tokenizer")
    texts = _Texts(tokenizer, max(contexts))
    made = []
    for name in names:
        shape = SHAPES[name]
        for context in contexts:
            prompts = tuple(
                texts.prompt(shape.kinds[at % len(shape.kinds)], at, length)
                for at, length in enumerate(lengths(shape, requests, context))
            )
            label = name if len(contexts) == 1 else f"{name}@{context}"
            made.append(Workload(label, prompts, new_tokens, context, shape.tier, shape.budget_share, shape.slowdown))
    return made


def lengths(shape: Shape, requests: int, context: int) -> list[int]:
    """Prompt lengths from the shortest to the longest."""
    if requests == 1:
        return [max(SHORTEST, round(shape.last * context))]
    found = []
    for at in range(requests):
        share = at / (requests - 1)
        if shape.geometric:
            part = shape.first * (shape.last / shape.first) ** share
        else:
            part = shape.first + (shape.last - shape.first) * share
        found.append(max(SHORTEST, round(part * context)))
    return found


class _Texts:
    """Token ids of the texts, encoded once; request ``at`` reads from a place of its own."""

    def __init__(self, tokenizer: Any, longest: int) -> None:
        self._tokenizer, self._longest = tokenizer, longest
        self._encoded: dict[str, list[int]] = {}

    def prompt(self, kind: Kind, at: int, length: int) -> Prompt:
        recipes = _RECIPES[kind]
        make, end = recipes[(at // 2) % len(recipes)]
        body = self._body(make)
        start = (at * 997) % max(1, len(body) - self._longest)
        ids = body[start : start + length]
        # The copy begins where the text began, far enough in for the model to see that it is one.
        cue = self._encode(end) + (ids[: min(48, length // 4)] if make is _sources and kind == "easy" else [])
        cue = cue[: length // 2]
        return Prompt(tuple(ids[: length - len(cue)] + cue), kind)

    def _body(self, make: Callable[[], str]) -> list[int]:
        if make.__name__ not in self._encoded:
            ids = self._encode(make())
            while len(ids) < 2 * self._longest:
                ids = ids + ids
            self._encoded[make.__name__] = ids
        return self._encoded[make.__name__]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def _sources() -> str:
    import argparse
    import heapq
    import statistics
    import textwrap

    return "\n".join(inspect.getsource(module) for module in (heapq, textwrap, statistics, argparse))


def _table() -> str:
    places = ("harbour", "orchard", "mill", "lighthouse", "quarry", "library", "bakery")
    return "".join(f"row {n}; place {places[n % 7]}; square {n % 10 * (n % 10)}; parity {n % 2}\n" for n in range(1000, 3000))


def _prose() -> str:
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


_RECIPES: Final[dict[Kind, tuple[tuple[Callable[[], str], str], ...]]] = {
    "easy": ((_sources, "\n\nThe same text once more, word for word:\n\n"), (_table, "\n")),
    "hard": ((_prose, "\n\nIn my own words, the most surprising thing about all this is that"), (_sources, "\n\n# Review:\n#")),
}
