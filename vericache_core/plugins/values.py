"""The kinds of values that an option may have, and how text or a loose value becomes one of them."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

T = TypeVar("T")
_TRUE, _FALSE = frozenset({"true", "yes", "on", "1"}), frozenset({"false", "no", "off", "0"})
_WORDS: Mapping[Any, str] = {bool: "true or false", int: "an integer", float: "a number", str: "text", Mapping: "a table"}


@dataclass(frozen=True)
class FieldType:
    """The part of Python's types that an option may have.

    ``base`` is bool, int, float, str, tuple or Mapping; ``item`` is the type of a tuple's items;
    ``choices`` are the values of a ``Literal``; ``names`` are words that may stand in place of a number.
    """

    base: Any
    optional: bool = False
    choices: tuple[Any, ...] | None = None
    item: FieldType | None = None
    names: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """What a person is told that the field expects."""
        if self.choices is not None:
            return "one of " + ", ".join(map(str, self.choices))
        if self.item is not None:
            return f"a list, each item {self.item.words}"
        return _WORDS[self.base]


def resolve_type(annotation: Any) -> FieldType:
    """Turn an annotation into a `FieldType`; raise TypeError for one that options cannot have."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        rest = [arg for arg in args if arg is not type(None)]
        if len(rest) == 1:
            return dataclasses.replace(resolve_type(rest[0]), optional=True)
        if len(rest) == len(args) == 2 and rest[0] in (int, float) and typing.get_origin(rest[1]) is Literal:
            return FieldType(rest[0], names=typing.get_args(rest[1]))
    elif origin is Literal and all(type(arg) in (bool, int, str) for arg in args):
        return FieldType(type(args[0]), choices=args)
    elif origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return FieldType(tuple, item=resolve_type(args[0]))
    elif annotation is Mapping or origin in (Mapping, dict) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return FieldType(Mapping)
    elif annotation in (bool, int, float, str):
        return FieldType(annotation)
    raise TypeError(
        f"{annotation!r} is not a type that an option can have; "
        "use bool, int, float, str, Literal, int | Literal, tuple[X, ...] or X | None"
    )


def convert(kind: FieldType, value: Any, text: bool) -> Any:
    """Return ``value`` as ``kind``; with ``text`` a string may stand for another type. Raises ValueError."""
    from_text = text and isinstance(value, str)
    if value is None or (from_text and kind.optional and value.strip().lower() == "none"):
        if kind.optional:
            return None
        raise ValueError
    if isinstance(value, str) and value.strip() in kind.names:
        return value.strip()
    if kind.choices is not None:
        for choice in kind.choices:
            # The type is compared too: 1 == True, and a file that says `true` did not mean 1.
            same = type(value) is type(choice) and value == choice
            if same or (from_text and value.strip() == str(choice)):
                return choice
        raise ValueError
    if kind.item is not None:
        if from_text:
            value = [part.strip() for part in value.split(",") if part.strip()]
        if not isinstance(value, (list, tuple)):
            raise ValueError
        return tuple(convert(kind.item, item, text) for item in value)
    return _SCALARS[kind.base](value, from_text)


def _to_bool(value: Any, from_text: bool) -> bool:
    if isinstance(value, bool):
        return value
    if from_text and value.strip().lower() in _TRUE | _FALSE:
        return value.strip().lower() in _TRUE
    raise ValueError


def _to_int(value: Any, from_text: bool) -> int:
    if from_text:
        return _parse(int, value)
    if not isinstance(value, bool) and isinstance(value, numbers.Integral):
        return operator.index(value)
    raise ValueError


def _to_float(value: Any, from_text: bool) -> float:
    if from_text:
        value = _parse(float, value)
    if not isinstance(value, bool) and isinstance(value, numbers.Real):
        try:
            result = float(value)
        except OverflowError:
            raise ValueError("too large") from None
        if math.isfinite(result):
            return result
        raise ValueError("not a finite number")
    raise ValueError


def _parse(kind: Callable[[str], T], value: str) -> T:
    try:
        return kind(value)
    except ValueError:
        raise ValueError from None  # Python's own wording repeats ours


def _to_str(value: Any, from_text: bool) -> str:  # noqa: ARG001  # same signature as its siblings
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str):
        return value
    raise ValueError


def _to_mapping(value: Any, from_text: bool) -> Mapping[str, Any]:
    if from_text:
        return parse_pairs(part for part in value.split(",") if part.strip())
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return types.MappingProxyType(dict(value))
    raise ValueError


_SCALARS: Mapping[Any, Callable[[Any, bool], Any]] = {
    bool: _to_bool,
    int: _to_int,
    float: _to_float,
    str: _to_str,
    Mapping: _to_mapping,
}


def parse_pairs(pairs: Iterable[str]) -> dict[str, str]:
    """Turn ``["bits=2", "group=32"]`` into a dict of strings; raise ValueError for a pair without ``=`` or given twice."""
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key:
            raise ValueError(f"{pair!r} is not of the form key=value")
        if key in found:
            raise ValueError(f"{key!r} is given twice")
        found[key] = value.strip()
    return found
