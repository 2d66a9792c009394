"""An argument parser whose complaints look like every other error of ours."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from vericache_core.errors import UsageError
from vericache_core.plugins.fields import did_you_mean


class Parser(argparse.ArgumentParser):
    """argparse, raising UsageError instead of printing and exiting, and without abbreviated options.

    An abbreviation that works today breaks the day an option with the same beginning is added.
    """

    def __init__(self, **arguments: Any) -> None:
        arguments.setdefault("allow_abbrev", False)
        super().__init__(**arguments)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        for text in unknown:
            flag = text.partition("=")[0]
            if flag.startswith("--") and len(flag) > len("--"):
                near = did_you_mean(flag, self._option_string_actions)
                self.error(f"unrecognized arguments: {flag}" + (f"; did you mean {near!r}?" if near else ""))
        return found, unknown

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"{self.prog} --help")
