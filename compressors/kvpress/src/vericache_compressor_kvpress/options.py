"""Options that every press has, and a way to set its own."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from vericache_core import Budget, option
from vericache_core.errors import OptionError


@dataclass(frozen=True, kw_only=True)
class KvpressOptions(Budget):
    """Budget, and arguments of the press's own by name.

    ``keep`` is the fraction kept, kvpress's ``compression_ratio`` the fraction removed: the latter cannot be set.
    """

    seed: int = option(0, help="seed of presses that draw numbers", ge=0)
    inner: str | None = option(None, help="class of the press to wrap, such as KnormPress, for presses that wrap one")
    arguments: tuple[str, ...] = option((), help="arguments of the press, such as window_size=32,kernel_size=7")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.parsed_arguments()

    def parsed_arguments(self) -> dict[str, Any]:
        """``arguments`` as Python values.

        Raises:
            OptionError: not of the form ``name=value``, or the ratio that ``keep`` sets.
        """
        found: dict[str, Any] = {}
        for text in self.arguments:
            name, equals, value = text.partition("=")
            name = name.strip()
            if not equals or not name.isidentifier():
                raise OptionError(f"arguments: {text!r} is not of the form name=value")
            if name == "compression_ratio":
                raise OptionError("arguments: compression_ratio is set through keep", hint="keep = 1 - compression_ratio")
            try:
                found[name] = ast.literal_eval(value.strip())
            except (ValueError, SyntaxError):
                found[name] = value.strip()
        return found
