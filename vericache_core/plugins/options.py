"""Typed options: a frozen dataclass per compressor, from which parsing, help and JSON Schema are derived.

A plugin writes::

    @dataclass(frozen=True)
    class MyOptions(Budget):
        kernel: int = option(5, help="pooling width", unit="tokens", ge=1)

and users then say ``-o kernel=7``, ``[options] kernel = 7`` or ``MyOptions(kernel=7)``; all three are
checked in the same way.

Rounding rule of a budget: ``keep`` is read as the decimal that was written (0.1 is one tenth, not the nearest
binary fraction), multiplied by the number of tokens, rounded down, and clamped to ``[1, tokens]``. So 0.1 of
100 is 10, 0.9 of 10 is 9, 0.01 of 10 is 1, and only a prefix of no tokens keeps none. Binary floats get this
wrong: ``int(100 * (1 - 0.9))`` is 9.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, ClassVar, TypeVar

from vericache_core.errors import OptionError, UsageError
from vericache_core.plugins.fields import coerce, did_you_mean, option, option_fields

__all__ = ["Budget", "Options", "check_options", "kept_tokens", "option", "options_to_json", "parse_options"]

OptionsT = TypeVar("OptionsT")


@dataclass(frozen=True)
class Options:
    """Base of a compressor's options that validates itself however it is built.

    A subclass with a rule across fields overrides ``__post_init__``, calls ``super().__post_init__()`` first
    and raises ValueError or OptionError. Do not decorate a subclass with ``slots=True``: it breaks ``super()``.
    """

    def __post_init__(self) -> None:
        check_options(self)


def check_options(instance: Any, *, error: type[UsageError] = OptionError) -> None:
    """Check each field of a dataclass instance in place, normalising what is legal (an int in a float field)."""
    for name, field in option_fields(type(instance)).items():
        # object.__setattr__ because the instance is frozen; this runs only while it is being built.
        object.__setattr__(instance, name, coerce(field, getattr(instance, name), text=False, error=error))


def kept_tokens(tokens: int, *, keep: float | None = None, keep_tokens: int | None = None) -> int:
    """Return how many of ``tokens`` survive under exactly one of a fraction ``keep`` or a count ``keep_tokens``."""
    if tokens < 0:
        raise ValueError(f"tokens must not be negative, got {tokens}")
    if (keep is None) == (keep_tokens is None):
        raise OptionError("give exactly one of keep and keep_tokens")
    # str() of a float is the shortest decimal that reads back as it, that is, what the user wrote.
    wanted = keep_tokens if keep_tokens is not None else int(Fraction(str(float(keep or 0.0))) * tokens)
    return min(max(wanted, 1), tokens)


@dataclass(frozen=True, kw_only=True)
class Budget(Options):
    """Options base with a budget: ``keep`` (fraction kept) or ``keep_tokens`` (count kept), never both.

    With neither given the budget is ``default_keep``, which a subclass may override. It is not the default of
    the ``keep`` field, because ``keep_tokens=512`` alone would then be a conflict.
    """

    keep: float | None = option(None, help="fraction of tokens kept; not together with keep_tokens", gt=0, le=1)
    keep_tokens: int | None = option(None, help="number of tokens kept; not together with keep", unit="tokens", ge=1)

    default_keep: ClassVar[float] = 0.25
    schema_extra: ClassVar[dict[str, Any]] = {
        "not": {
            "properties": {"keep": {"type": "number"}, "keep_tokens": {"type": "integer"}},
            "required": ["keep", "keep_tokens"],
        }
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep is not None and self.keep_tokens is not None:
            raise OptionError(
                f"keep={self.keep:g} and keep_tokens={self.keep_tokens} are both given", hint="give only one of them"
            )

    def kept_tokens(self, tokens: int) -> int:
        """Return how many of ``tokens`` this budget keeps: at least 1 unless there are none (rounding: see the module)."""
        if self.keep_tokens is not None:
            return kept_tokens(tokens, keep_tokens=self.keep_tokens)
        return kept_tokens(tokens, keep=self.default_keep if self.keep is None else self.keep)


def parse_options(options_type: type[OptionsT], mapping: Mapping[str, Any]) -> OptionsT:
    """Build ``options_type`` from names and values out of a file or a command line.

    A string stands for any type (``"2"`` for 2), so the caller need not know the types.
    Raises OptionError for an unknown name (with the nearest known one), a wrong type, or a value out of range.
    """
    known = option_fields(options_type)
    values = {}
    for name, value in mapping.items():
        key = name.replace("-", "_")
        if key not in known:
            raise unknown_option(name, known)
        values[key] = coerce(known[key], value, text=True)
    try:
        return options_type(**values)
    except UsageError:
        raise
    except (TypeError, ValueError) as error:  # what a plugin's own __post_init__ naturally raises
        raise OptionError(str(error) or f"bad options for {options_type.__qualname__}") from error


def unknown_option(name: str, known: Mapping[str, Any]) -> OptionError:
    """Return the error for an option that does not exist, with the nearest name and all the legal ones."""
    near = did_you_mean(name, known)
    suffix = f"; did you mean {near!r}?" if near else ""
    valid = ", ".join(known) if known else "none, this compressor has no options"
    no_budget = name in ("keep", "keep_tokens")
    cause = "this compressor drops no tokens, so it takes no budget" if no_budget else None
    return OptionError(f"unknown option {name!r}{suffix}", cause=cause, hint=f"valid options: {valid}")


def options_to_json(instance: Any) -> dict[str, Any]:
    """Return every option as JSON types, defaults included; ``parse_options`` gives an equal instance back."""
    return {field.name: plain(getattr(instance, field.name)) for field in fields(instance) if field.init}


def plain(value: Any) -> Any:
    """Return a value in JSON types: tuples as lists, read-only mappings as dicts."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
