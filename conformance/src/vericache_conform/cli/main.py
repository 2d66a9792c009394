"""Entry point of ``vericache-conform``.

Exit codes are pytest's: 0 fine, 1 failures, 2 interrupted, 3 bug of the suite, 4 usage, 5 nothing ran.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Final

from vericache_conform._version import __version__
from vericache_core.cli.output import debug_enabled, report_error
from vericache_core.cli.parser import Parser
from vericache_core.errors import UsageError, VeriCacheError
from vericache_core.plugins.fields import did_you_mean

COMMANDS: Final = {
    "run": "check compressors, and say whether they may be trusted",
    "list": "the checks, by tier",
    "explain": "what a check is for, where it comes from, and how to mend what it finds",
    "replay": "run the failures of a report again, each with just the input that failed",
    "report": "show a report, or write it as JUnit XML, Markdown or HTML",
    "compare": "a leaderboard across compressors, or what changed between two reports",
    "mutants": "test the suite itself: deliberately broken compressors against the checks meant for them",
    "passport": "show, sign and verify conformance passports",
    "schema": "JSON Schema of what this command writes",
}
OK: Final = 0
FAILED: Final = 1
INTERRUPTED: Final = 2
INTERNAL: Final = 3
USAGE: Final = 4
NOTHING: Final = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; never raises for an expected error."""
    try:
        try:
            code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        except SystemExit as done:  # argparse after --help or --version
            code = done.code if isinstance(done.code, int) else OK
        sys.stdout.flush()
    except VeriCacheError as error:
        _show_traceback()
        report_error(error.message, cause=error.cause, hint=error.hint)
        return USAGE if isinstance(error, UsageError) else FAILED
    except KeyboardInterrupt:
        print("vericache-conform: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:  # noqa: BLE001  # the last line of defence: a bug is reported, not dumped
        _show_traceback()
        hint = None if debug_enabled() else "this is a bug of the suite; VERICACHE_DEBUG=1 shows the traceback"
        report_error(f"internal error: {type(error).__name__}: {error}", hint=hint)
        return INTERNAL
    return code


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0].startswith("-"):
        _root_parser().parse_args(argv or ["--help"])
        return OK
    command, rest = argv[0], argv[1:]
    if command not in COMMANDS:
        near = did_you_mean(command, COMMANDS)
        suffix = f"; did you mean {near!r}?" if near else ""
        raise UsageError(f"unknown command {command!r}{suffix}", hint=f"commands: {', '.join(COMMANDS)}")
    module = importlib.import_module(f"vericache_conform.cli.{command}")
    parser = Parser(prog=f"vericache-conform {command}", description=COMMANDS[command])
    module.add_arguments(parser)
    code: int = module.run(parser.parse_args(rest))
    return code


def _root_parser() -> Parser:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name.ljust(width)}  {summary}" for name, summary in COMMANDS.items())
    parser = Parser(
        prog="vericache-conform",
        usage="vericache-conform [-h] [--version] COMMAND ...",
        description=f"May this compressor be trusted, and if not, why?\n\ncommands:\n{commands}",
        epilog="vericache-conform COMMAND --help says more about one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"vericache-conform {__version__}")
    return parser


def _show_traceback() -> None:
    if debug_enabled():
        traceback.print_exc()


if __name__ == "__main__":
    sys.exit(main())
