"""Logs as JSON lines on stderr; what is about a request says so in ``extra={"request": ...}``."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone
from typing import Any, Final, TextIO

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_RESERVED: Final = {"time", "level", "logger"}


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time`` (UTC), ``level``, ``logger``, ``message`` and the fields of ``extra``.

    An exception comes as its traceback in ``exception``. A value that JSON does not know is written as its text.
    """

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update((key, value) for key, value in vars(record).items() if key not in _STANDARD | _RESERVED)
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def configure_logs(level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Send the logs of the whole process to ``stream`` (stderr) as JSON lines, in place of where they went before."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    ours = logging.getLogger("vericache")
    for other in list(ours.handlers):  # the command line's, which writes lines for people
        ours.removeHandler(other)
