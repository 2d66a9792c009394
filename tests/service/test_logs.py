"""Structured logs."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from vericache_core.service.logs import JsonFormatter


def lines(write: Callable[[logging.Logger], None]) -> list[dict[str, Any]]:
    stream, logger = io.StringIO(), logging.getLogger("vericache.test")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        write(logger)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_an_object_whatever_the_message_holds() -> None:
    (entry,) = lines(
        lambda logger: logger.warning('a "quoted"\nsecond line \u2603 %s', {1}, extra={"bytes": 7, "level": "mine"})
    )
    assert entry["message"] == 'a "quoted"\nsecond line \u2603 {1}'
    assert (entry["level"], entry["logger"], entry["bytes"]) == ("warning", "vericache.test", 7)
    assert entry["time"].endswith("+00:00")
    assert "request" not in entry


def test_a_line_about_a_request_carries_it() -> None:
    (entry,) = lines(lambda logger: logger.info("about it", extra={"request": 9}))
    assert entry["request"] == 9


def test_an_exception_stays_on_its_line() -> None:
    def write(logger: logging.Logger) -> None:
        try:
            int("first\nsecond")
        except ValueError:
            logger.exception("failed", extra={"cause": object})

    (entry,) = lines(write)
    assert entry["exception"].endswith("ValueError: invalid literal for int() with base 10: 'first\\nsecond'")
    assert entry["exception"].count("\n") > 1
    assert entry["cause"] == "<class 'object'>"


def test_configured_logs_are_json_only_and_not_doubled_by_the_command_line() -> None:
    code = (
        "import logging\n"
        "from vericache_core.cli.output import show_warnings\n"
        "from vericache_core.service.logs import configure_logs\n"
        "show_warnings()\n"
        "configure_logs()\n"
        "logging.getLogger('vericache.runtime').warning('once')\n"
        "logging.getLogger('someone.else').info('too')\n"
        "logging.getLogger('someone.else').debug('not this')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    assert [json.loads(line)["message"] for line in done.stderr.splitlines()] == ["once", "too"]
