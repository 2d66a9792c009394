"""JSON Schemas of what the command writes."""

from __future__ import annotations

from typing import Any, Final

from vericache_conform.outcome import OUTCOMES
from vericache_conform.report.model import SCHEMA
from vericache_core.plugins.passport import SCHEMA as PASSPORT

_TEXT: Final = {"type": "string"}
_NUMBER: Final = {"type": "number"}
_TABLE: Final = {"type": "object"}


def _object(required: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {**required, **more}, "required": list(required)}


HEADER: Final = _object(
    {
        "kind": {"const": "header"},
        "schema": {"const": SCHEMA},
        "suite": _TEXT,
        "core": _TEXT,
        "api_version": {"type": "integer"},
        "platform": _TEXT,
        "seed": {"type": "integer"},
        "subjects": {"type": "array", "items": _object({"name": _TEXT, "loaded": {"type": "boolean"}})},
        "checks": {"type": "array", "items": _TEXT},
        "required": {"type": "array", "items": _TEXT},
        "started": _TEXT,
    }
)
RESULT: Final = _object(
    {
        "kind": {"const": "result"},
        "check": _TEXT,
        "subject": _TEXT,
        "outcome": {"enum": list(OUTCOMES)},
        "message": _TEXT,
        "tried": {"type": "integer"},
        "seconds": _NUMBER,
        "facts": _TABLE,
    },
    example={"type": ["object", "null"]},
    output=_TEXT,
    declared={"type": "boolean"},
    reproduce=_TEXT,
)
FOOTER: Final = _object(
    {
        "kind": {"const": "footer"},
        "results": {"type": "integer"},
        "counts": _TABLE,
        "levels": _TABLE,
        "summary": _TEXT,
        "exit_status": {"type": "integer"},
        "finished": _TEXT,
        "seconds": _NUMBER,
    }
)
_DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"
SCHEMAS: Final[dict[str, dict[str, Any]]] = {
    "report": {
        "$schema": _DRAFT,
        "title": f"one line of a report ({SCHEMA}): a header, results, a footer",
        "oneOf": [HEADER, RESULT, FOOTER],
    },
    "passport": {
        "$schema": _DRAFT,
        "title": PASSPORT,
        **_object(
            {
                "schema": {"const": PASSPORT},
                "distribution": _TEXT,
                "version": _TEXT,
                "digest": _TEXT,
                "compressors": {"type": "object", "additionalProperties": {"enum": ["certified", "passed", "failed"]}},
                "suite": _TEXT,
                "core": _TEXT,
                "api_version": {"type": "integer"},
                "platform": _TEXT,
                "device": _TEXT,
                "dtypes": {"type": "array", "items": _TEXT},
                "results": _TABLE,
                "issued": _TEXT,
            },
            signature=_object({"algorithm": {"const": "ed25519"}, "key": _TEXT, "value": _TEXT}),
        ),
    },
}
