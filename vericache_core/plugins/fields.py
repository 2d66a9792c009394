"""What one option field is: its type, its metadata, and how a value becomes legal or is refused by name.

Options of compressors and the engine configuration share this file, so that ranges, coercion and error
texts come from one place. It imports nothing that is large.
"""

from __future__ import annotations

import dataclasses
import difflib
import operator
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar, overload

from vericache_core.errors import OptionError, UsageError
from vericache_core.plugins.values import FieldType, convert, parse_pairs, resolve_type
from vericache_core.sizes import is_size, parse_size

__all__ = [
    "METADATA_KEY",
    "FieldType",
    "OptionField",
    "OptionInfo",
    "coerce",
    "did_you_mean",
    "option",
    "option_fields",
    "parse_pairs",
    "resolve_type",
]

T = TypeVar("T")
METADATA_KEY = "vericache"
SIZES: Final = ("bytes", "bytes/s")
"""Units of fields that may be given as a size."""


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
        words = " ".join(part for part in (words, bounds) if part)
        words += ", or a size such as 10GB" if self.info.unit in SIZES else ""
        return " or ".join([words, *self.type.names])


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
    ``"a,b"`` for a tuple. Everywhere a size, ``"10GB"``, may stand for bytes, and not-a-number and infinity are refused.
    """
    label = label or field.name
    if field.info.unit in SIZES and isinstance(value, str) and is_size(value):
        value = parse_size(value, label)
    try:
        result = convert(field.type, value, text)
        _check_range(field, result)
    except ValueError as problem:
        raise error(f"{label}: expected {field.expectation}, got {value!r}", cause=str(problem) or None) from None
    return result


def _bounds(info: OptionInfo) -> tuple[tuple[str, float | None], ...]:
    return ((">=", info.ge), (">", info.gt), ("<=", info.le), ("<", info.lt))


def _check_range(field: OptionField, value: Any) -> None:
    info = field.info
    if value is None or (isinstance(value, str) and value in field.type.names):
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
