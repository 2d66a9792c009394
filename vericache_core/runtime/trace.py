"""Arrivals: from a trace file, or drawn as a Poisson process."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from vericache_core.errors import ConfigError
from vericache_core.plugins.fields import did_you_mean


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to come.

    Attributes:
        at: seconds after the start.
        prompt_tokens, new_tokens: lengths.
        priority: higher goes first.
        hazard: of its drafts, for simulations; None for that of the compressor.
    """

    at: float
    prompt_tokens: int
    new_tokens: int
    priority: int = 0
    hazard: float | None = None


def poisson(
    rate: float, count: int, prompt_tokens: tuple[int, int], new_tokens: int, hazards: Sequence[float], seed: int
) -> list[Arrival]:
    """Draw ``count`` arrivals at ``rate`` a second, 0 for all at once; prompt lengths lie evenly between two values.

    ``hazards`` are dealt out in turn.

    Raises:
        ConfigError: a value is out of range.
    """
    low, high = prompt_tokens
    if not 0 <= rate < math.inf or count < 1 or not 1 <= low <= high or new_tokens < 1:
        raise ConfigError(
            "impossible arrivals",
            cause=f"{count} requests at {rate:g} a second, {low} to {high} prompt tokens, {new_tokens} new tokens",
            hint="the rate is 0 or more, everything else 1 or more",
        )
    numbers, at, made = random.Random(seed), 0.0, []  # noqa: S311  (a simulation, no secret)
    for number in range(count):
        if rate and number:
            at += numbers.expovariate(rate)
        hazard = hazards[number % len(hazards)] if hazards else None
        made.append(Arrival(at, numbers.randint(low, high), new_tokens, hazard=hazard))
    return made


def read_trace(file: str | os.PathLike[str]) -> list[Arrival]:
    """Read a trace: JSON lines with the fields of :class:`Arrival`, in the order of arrival; blank lines are skipped.

    Raises:
        ConfigError: the file cannot be read or a line cannot be; the message names it.
    """
    name = os.fspath(file)
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"trace {name!r} cannot be read", cause=error.strerror) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"trace {name!r} is not UTF-8 text", cause=str(error)) from error
    arrivals: list[Arrival] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{name}:{number}"
        arrival = _arrival(where, line)
        if arrivals and arrival.at < arrivals[-1].at:
            raise ConfigError(
                f"{where}: arrives before the line above it",
                cause=f"{arrival.at:g} s after {arrivals[-1].at:g} s",
                hint="sort the trace by `at`",
            )
        arrivals.append(arrival)
    if not arrivals:
        raise ConfigError(f"trace {name!r} holds no arrivals")
    return arrivals


def _arrival(where: str, line: str) -> Arrival:
    try:
        facts = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON", cause=str(error)) from error
    if not isinstance(facts, Mapping):
        raise ConfigError(f"{where}: expected an object, got {line.strip()[:40]}")
    known = [field.name for field in fields(Arrival)]
    for key in facts:
        if key not in known:
            near = did_you_mean(key, known)
            raise ConfigError(
                f"{where}: unknown key {key!r}" + (f"; did you mean {near!r}?" if near else ""),
                hint=f"valid keys: {', '.join(known)}",
            )
    for key in ("at", "prompt_tokens", "new_tokens"):
        if key not in facts:
            raise ConfigError(f"{where}: {key} is missing")
    _number(where, facts, "at", lambda value: value >= 0, "seconds, 0 or more")
    for key in ("prompt_tokens", "new_tokens"):
        _whole(where, facts, key, least=1)
    _whole(where, facts, "priority", least=None)
    if facts.get("hazard") is not None:
        _number(where, facts, "hazard", lambda value: value <= 1, "a number from 0 to 1")
    return Arrival(**{**facts, "at": float(facts["at"])})


def _number(where: str, facts: Mapping[str, Any], key: str, good: Any, expected: str) -> None:
    value = facts[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf or not good(value):
        raise ConfigError(f"{where}: {key}: expected {expected}, got {value!r}")


def _whole(where: str, facts: Mapping[str, Any], key: str, *, least: int | None) -> None:
    value = facts.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        expected = "a whole number" if least is None else f"a whole number, {least} or more"
        raise ConfigError(f"{where}: {key}: expected {expected}, got {value!r}")
