"""What every command shares in talking to people and programs: data on stdout, everything else on stderr."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

_RED, _DIM, _RESET = "\x1b[31m", "\x1b[2m", "\x1b[0m"


def color_enabled(stream: TextIO) -> bool:
    """Say whether ``stream`` may carry colours: a terminal, and neither NO_COLOR nor a dumb one."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def debug_enabled() -> bool:
    """Say whether VERICACHE_DEBUG asks for tracebacks."""
    return os.environ.get("VERICACHE_DEBUG", "").strip().lower() not in ("", "0", "false", "no")


def print_json(schema: str, payload: Mapping[str, Any]) -> None:
    """Write one JSON document to stdout; ``schema`` names its form and version, such as ``vericache.plugins.list/1``.

    A form keeps its version as long as keys are only added.
    """
    print(json.dumps({"schema": schema, **payload}, indent=2, ensure_ascii=False, allow_nan=False))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write an aligned table to stdout."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def note(message: str) -> None:
    """Write one line for people to stderr."""
    print(f"vericache: {one_line(message)}", file=sys.stderr)


def report_error(message: str, *, cause: str | None = None, hint: str | None = None) -> None:
    """Write ``vericache: error: ...`` and, where there is one, ``hint: ...`` to stderr, a line each."""
    red, dim, reset = (_RED, _DIM, _RESET) if color_enabled(sys.stderr) else ("", "", "")
    text = one_line(message) + (f" ({one_line(cause)})" if cause else "")
    print(f"vericache: {red}error:{reset} {text}", file=sys.stderr)
    if hint:
        print(f"{dim}hint:{reset} {one_line(hint)}", file=sys.stderr)


class LogHandler(logging.Handler):
    """Writes our warnings in the form of every other line; looks stderr up each time, as tests replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        note(f"{record.levelname.lower()}: {record.getMessage()}")


def show_warnings() -> None:
    """Send the warnings of the whole package to stderr, once per process."""
    logger = logging.getLogger("vericache")
    if not any(isinstance(handler, LogHandler) for handler in logger.handlers):
        logger.addHandler(LogHandler(logging.WARNING))


def one_line(text: str) -> str:
    """Return a text on one line; messages of other libraries often span several."""
    return " ".join(text.split())
