"""Flags that would do nothing beside others: refused, since whoever gives one expects something of it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vericache_core.errors import UsageError


@dataclass(frozen=True)
class IdleFlags:
    """Flags, by their names in the parsed arguments, that do nothing where ``holds``."""

    names: tuple[str, ...]
    holds: Callable[[argparse.Namespace], object]
    because: str


def refuse_idle(
    args: argparse.Namespace, declare: Callable[[argparse.ArgumentParser], object], rules: Iterable[IdleFlags]
) -> None:
    """Raise ``UsageError`` for the first flag with another value than its default that a rule says does nothing.

    Args:
        args: parsed.
        declare: declares the command's arguments, whose defaults and flags count.
        rules: the first that holds gives the reason.
    """
    parser = argparse.ArgumentParser(add_help=False)
    declare(parser)
    flags = {action.dest: action.option_strings for action in parser._actions}  # noqa: SLF001
    for rule in rules:
        for name in rule.names if rule.holds(args) else ():
            value = getattr(args, name)
            if value != parser.get_default(name):
                negative = value is False
                flag = next(flag for flag in flags[name] if flag.startswith("--no-" if negative else "--"))
                raise UsageError(f"{flag} has no effect", cause=rule.because, hint="leave it out")
