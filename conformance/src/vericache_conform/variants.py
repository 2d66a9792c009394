"""Option sets that differ from the defaults in one field, made from what the fields say about themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vericache_conform.subject import Subject
from vericache_core.errors import VeriCacheError
from vericache_core.plugins.fields import OptionField, option_fields


def option_variants(subject: Subject) -> tuple[list[dict[str, Any]], list[str]]:
    """``(one option set per field, fields for which no other legal value was found)``.

    A number whose neighbours are refused by a rule across fields (a residual that must be a multiple of a group)
    is tried at its double, its half and a few small values.
    """
    found, stuck = [], []
    default: dict[str, Any] = {}
    for field in option_fields(subject.spec.options).values():
        if field.name in subject.options:
            continue
        for value in _candidates(field):
            given = {**default, field.name: value}
            if value != field.default and _legal(subject, given):
                found.append(given)
                break
        else:
            stuck.append(field.name)
    return found, stuck


def _legal(subject: Subject, options: dict[str, Any]) -> bool:
    try:
        subject.create(options)
    except VeriCacheError:
        return False
    return True


def _candidates(field: OptionField) -> Iterator[Any]:
    choices = field.info.choices or field.type.choices
    if choices is not None:
        yield from choices
        return
    base = field.type.base
    if base is bool:
        yield not field.default
    elif base is int:
        default = field.default if isinstance(field.default, int) else 24
        yield from (2 * default, default // 2, default + 2, default + 1, default - 1, 3, 1, 8, 16)
    elif base is float:
        share = field.default if isinstance(field.default, float) else 0.4
        yield from (share * 0.5, share + 0.1, share * 2, 0.5, 0.3)
    elif base is str and field.default is not None:  # an unset text may be a path: nothing is invented for it
        yield from (f"{field.default}x", "other")
