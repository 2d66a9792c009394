"""Rows of the table as JSON lines: what ``--json`` prints, and what a later run need not measure again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from vericache_core.bench.compressors import Row, Setting
from vericache_core.errors import UsageError

SCHEMA: Final = "vericache.bench.compressors/1"
_BY_WINDOW: Final = ("accepted_mean", "hazard_by_window")


def as_line(head: Mapping[str, Any], row: Row) -> str:
    """A row as one JSON object; ``head`` comes first and says which schema, model and kind of run it belongs to."""
    plain = asdict(row)
    for name in _BY_WINDOW:
        plain[name] = {str(window): value for window, value in plain[name].items()}
    return json.dumps({**head, **plain}, ensure_ascii=False, allow_nan=False)


def from_line(head: Mapping[str, Any], line: str) -> Row | None:
    """Inverse of :func:`as_line`; ``None`` for a line of another head, or what is no such line."""
    try:
        found = json.loads(line)
        if any(found.pop(key) != value for key, value in head.items()):
            return None
        for name in _BY_WINDOW:
            found[name] = {int(window): value for window, value in found.get(name, {}).items()}
        return Row(**found)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


class LinesFile:
    """A file that each row is appended to as soon as it is measured, or nothing without ``path``.

    Lines of another head stay there and count for nothing, and so does one that was cut off while it was written.

    Raises:
        UsageError: the file cannot be read and written.
    """

    def __init__(self, path: str | None, head: Mapping[str, Any]) -> None:
        self._path, self._head = None if path is None else Path(path), head
        self._rows: dict[str, Row] = {}
        if self._path is None:
            return
        try:
            with self._path.open("a+", encoding="utf-8") as file:
                file.seek(0)
                text = file.read()
                if text and not text.endswith("\n"):
                    file.write("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--lines {path}: cannot be read and written", cause=str(error)) from error
        for row in filter(None, (from_line(head, line) for line in text.splitlines())):
            self._rows[_key(row.compressor, row.options, row.prompt)] = row

    def find(self, setting: Setting, prompt: str) -> Row | None:
        """The row of an earlier run."""
        return self._rows.get(_key(setting.compressor, setting.options, prompt))

    def add(self, row: Row) -> None:
        """Append a row."""
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(as_line(self._head, row) + "\n")


def _key(compressor: str, options: Mapping[str, Any], prompt: str) -> str:
    return json.dumps([compressor, dict(options), prompt], sort_keys=True)
