"""An argument parser whose complaints look like every other error of ours."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from vericache_core.errors import UsageError


class Parser(argparse.ArgumentParser):
    """argparse, raising UsageError instead of printing and exiting, and without abbreviated options.

    An abbreviation that works today breaks the day an option with the same beginning is added.
    """

    def __init__(self, **arguments: Any) -> None:
        arguments.setdefault("allow_abbrev", False)
        super().__init__(**arguments)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"{self.prog} --help")
