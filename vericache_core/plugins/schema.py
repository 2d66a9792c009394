"""JSON Schema of an options dataclass, derived from the same metadata as parsing and help."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vericache_core.plugins.fields import FieldType, OptionField, OptionInfo, option_fields
from vericache_core.plugins.options import plain

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_JSON_TYPES: Mapping[Any, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    tuple: "array",
    Mapping: "object",
}
_BOUNDS = (("ge", "minimum"), ("gt", "exclusiveMinimum"), ("le", "maximum"), ("lt", "exclusiveMaximum"))


def options_schema(options_type: type[Any]) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of an options dataclass.

    A class attribute ``schema_extra`` (a mapping) is merged at the top level: rules across fields go there.
    """
    schema: dict[str, Any] = {
        "$schema": DIALECT,
        "title": options_type.__qualname__,
        "type": "object",
        "additionalProperties": False,
        "properties": {name: field_schema(field) for name, field in option_fields(options_type).items()},
    }
    return schema | dict(getattr(options_type, "schema_extra", {}))


def field_schema(field: OptionField) -> dict[str, Any]:
    """Return the schema of one field: type, range, default, help."""
    schema = _type_schema(field.type, field.info)
    if field.info.help:
        schema["description"] = field.info.help + (f" [{field.info.unit}]" if field.info.unit else "")
    schema["default"] = plain(field.default)
    return schema


def _type_schema(kind: FieldType, info: OptionInfo) -> dict[str, Any]:
    if kind.item is not None:  # bounds and choices of a tuple speak about its items
        inner: dict[str, Any] = {"type": "array", "items": _type_schema(kind.item, info)}
    else:
        inner = {"type": _JSON_TYPES[kind.base]}
        choices = kind.choices if info.choices is None else info.choices
        if choices is not None:
            inner["enum"] = list(choices)
        inner |= {key: getattr(info, name) for name, key in _BOUNDS if getattr(info, name) is not None}
    if kind.names:
        inner = {"anyOf": [inner, {"type": "string", "enum": list(kind.names)}]}
    if kind.optional:
        inner["type"] = [inner["type"], "null"]
        if "enum" in inner:
            inner["enum"].append(None)
    return inner
