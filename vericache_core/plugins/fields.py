"""What one option field is: its type, its metadata, and how a value becomes legal or is refused by name.

Options of compressors and the engine configuration share this file, so that ranges, coercion and error
texts come from one place. It imports nothing but the standard library.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import operator
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, overload

from vericache_core.errors import OptionError, UsageError

T = TypeVar("T")
METADATA_KEY = "vericache"
_TRUE, _FALSE = frozenset({"true", "yes", "on", "1"}), frozenset({"false", "no", "off", "0"})
_WORDS: Mapping[Any, str] = {bool: "true or false", int: "an integer", float: "a number", str: "text", Mapping: "a table"}


@dataclass(frozen=True)
class OptionInfo:
    """What a field says about itself beyond its type: help, unit and the legal range."""

    help: str = ""
    unit: str | None = None
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    choices: tuple[Any, ...] | None = None


@overload
def option(
    default: T,
    *,
    help: str,
    unit: str | None = None,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: Iterable[Any] | None = None,
) -> T: ...


@overload
def option(*, default_factory: Callable[[], T], help: str, unit: str | None = None) -> T: ...


def option(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    default_factory: Any = dataclasses.MISSING,
    unit: str | None = None,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    choices: Iterable[Any] | None = None,
) -> Any:
    """Declare one field of an options dataclass.

    For example ``bits: int = option(4, help="bits per value", choices=(2, 4))``.

    ``ge``, ``gt``, ``le`` and ``lt`` bound a number (and each item of a tuple); ``choices`` lists the legal values.
    Every field has a default, so that ``-c NAME`` alone always works.
    """
    info = OptionInfo(help, unit, ge, gt, le, lt, None if choices is None else tuple(choices))
    # Left out when unused: dataclasses refuses a field with both, even if one is MISSING-like None.
    kwargs = {"default_factory": default_factory} if default is dataclasses.MISSING else {"default": default}
    return dataclasses.field(metadata={METADATA_KEY: info}, **kwargs)


@dataclass(frozen=True)
class FieldType:
    """The part of Python's types that an option may have.

    ``base`` is bool, int, float, str, tuple or Mapping; ``item`` is the type of a tuple's items;
    ``choices`` are the values of a ``Literal``.
    """

    base: Any
    optional: bool = False
    choices: tuple[Any, ...] | None = None
    item: FieldType | None = None

    @property
    def words(self) -> str:
        """What a person is told that the field expects."""
        if self.choices is not None:
            return "one of " + ", ".join(map(str, self.choices))
        if self.item is not None:
            return f"a list, each item {self.item.words}"
        return _WORDS[self.base]


@dataclass(frozen=True)
class OptionField:
    """One field of an options dataclass, resolved."""

    name: str
    type: FieldType
    info: OptionInfo
    default: Any

    @property
    def expectation(self) -> str:
        """What a person is told about a legal value: type, range and unit."""
        words = self.type.words if self.info.choices is None else "one of " + ", ".join(map(str, self.info.choices))
        bounds = " and ".join(f"{sign} {bound:g}" for sign, bound in _bounds(self.info) if bound is not None)
        return " ".join(part for part in (words, bounds) if part)


def resolve_type(annotation: Any) -> FieldType:
    """Turn an annotation into a `FieldType`; raise TypeError for one that options cannot have."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        rest = [arg for arg in args if arg is not type(None)]
        if len(rest) == 1:
            return dataclasses.replace(resolve_type(rest[0]), optional=True)
    elif origin is Literal and all(type(arg) in (bool, int, str) for arg in args):
        return FieldType(type(args[0]), choices=args)
    elif origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return FieldType(tuple, item=resolve_type(args[0]))
    elif annotation is Mapping or origin in (Mapping, dict) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return FieldType(Mapping)
    elif annotation in (bool, int, float, str):
        return FieldType(annotation)
    raise TypeError(
        f"{annotation!r} is not a type that an option can have; use bool, int, float, str, Literal, tuple[X, ...] or X | None"
    )


def option_fields(options_type: Any) -> dict[str, OptionField]:
    """Return the fields that a caller may set, by name; raise TypeError when the dataclass is not usable as options."""
    if not (isinstance(options_type, type) and dataclasses.is_dataclass(options_type)):
        raise TypeError(f"options must be a dataclass type, not {options_type!r}")
    params: Any = vars(options_type).get("__dataclass_params__")
    if params is None or not params.frozen:
        raise TypeError(f"options {options_type.__qualname__} must be decorated with @dataclass(frozen=True)")
    hints = typing.get_type_hints(options_type)
    found = {}
    for field in dataclasses.fields(options_type):
        if not field.init:
            continue
        if field.default is not dataclasses.MISSING:
            default = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        else:
            raise TypeError(f"option {field.name!r} of {options_type.__qualname__} has no default")
        try:
            field_type = resolve_type(hints[field.name])
        except TypeError as error:
            raise TypeError(f"option {field.name!r} of {options_type.__qualname__}: {error}") from None
        found[field.name] = OptionField(field.name, field_type, field.metadata.get(METADATA_KEY, OptionInfo()), default)
    return found


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that ``name`` most likely meant, or None."""
    near = difflib.get_close_matches(name.lower().replace("-", "_"), list(known), n=1, cutoff=0.6)
    near = near or difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.6)
    return near[0] if near else None


def coerce(
    field: OptionField, value: Any, *, text: bool, label: str | None = None, error: type[UsageError] = OptionError
) -> Any:
    """Return ``value`` as the field's type and inside its range, or raise ``error`` naming ``label``.

    With ``text`` a string may stand for another type, as on a command line: ``"2"`` for 2, ``"none"`` for None,
    ``"a,b"`` for a tuple. Not-a-number and infinity are refused everywhere.
    """
    label = label or field.name
    try:
        result = _convert(field.type, value, text)
        _check_range(field, result)
    except ValueError as problem:
        raise error(f"{label}: expected {field.expectation}, got {value!r}", cause=str(problem) or None) from None
    return result


def _bounds(info: OptionInfo) -> tuple[tuple[str, float | None], ...]:
    return ((">=", info.ge), (">", info.gt), ("<=", info.le), ("<", info.lt))


def _convert(kind: FieldType, value: Any, text: bool) -> Any:
    from_text = text and isinstance(value, str)
    if value is None or (from_text and kind.optional and value.strip().lower() == "none"):
        if kind.optional:
            return None
        raise ValueError
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
        return tuple(_convert(kind.item, item, text) for item in value)
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


def _check_range(field: OptionField, value: Any) -> None:
    info = field.info
    if value is None:
        return
    if info.choices is not None and value not in info.choices:
        raise ValueError
    for item in value if field.type.item is not None else (value,):
        for sign, bound in _bounds(info):
            if bound is not None and not _COMPARE[sign](item, bound):
                raise ValueError


_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
}
