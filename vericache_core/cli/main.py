"""Entry point of ``vericache``: find the command, import only that one, turn errors into lines and exit codes.

A command is a module with ``add_arguments(parser)`` and ``run(args) -> int``. Exit codes: 0 for success,
1 for a failure, 2 for a request that could never have worked, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Final

from vericache_core._version import __version__
from vericache_core.cli.output import debug_enabled, report_error, show_warnings
from vericache_core.cli.parser import Parser
from vericache_core.errors import UsageError, VeriCacheError
from vericache_core.plugins.fields import did_you_mean

COMMANDS: Final = {
    "generate": "write text with a compressed KV cache, token for token what the full one writes",
    "plugins": "list, check and show compressors",
    "config": "show, validate and describe configuration",
    "bench": "measure compressors: bytes, accepted drafts, time, and that the output stays the same",
    "doctor": "report versions and prove row invariance on this machine",
}
"""Each command and its line in ``--help``; the module is ``vericache_core.cli.<command>``."""

INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141  # what a shell reports for a program that SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; never raises for an expected error."""
    show_warnings()
    try:
        try:
            code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        except SystemExit as done:  # argparse after --help or --version
            code = done.code if isinstance(done.code, int) else 0
        sys.stdout.flush()  # here, so that a closed pipe is noticed inside the try
    except VeriCacheError as error:
        _show_traceback()
        report_error(error.message, cause=error.cause, hint=error.hint)
        return error.exit_code
    except KeyboardInterrupt:
        _show_traceback()
        print("vericache: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone (`vericache ... | head`). Python flushes stdout once more at exit and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:  # noqa: BLE001  # the last line of defence: a bug is reported, not dumped
        _show_traceback()
        hint = None if debug_enabled() else "this is a bug; VERICACHE_DEBUG=1 shows the traceback"
        report_error(f"internal error: {type(error).__name__}: {error}", hint=hint)
        return 1
    return code


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0].startswith("-"):
        _root_parser().parse_args(argv or ["--help"])
        return 0
    command, rest = argv[0], argv[1:]
    if command not in COMMANDS:
        near = did_you_mean(command, COMMANDS)
        suffix = f"; did you mean {near!r}?" if near else ""
        raise UsageError(f"unknown command {command!r}{suffix}", hint=f"commands: {', '.join(COMMANDS)}")
    module = importlib.import_module(f"vericache_core.cli.{command}")
    parser = Parser(prog=f"vericache {command}", description=COMMANDS[command])
    module.add_arguments(parser)
    code: int = module.run(parser.parse_args(rest))
    return code


def _root_parser() -> Parser:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name.ljust(width)}  {summary}" for name, summary in COMMANDS.items())
    parser = Parser(
        prog="vericache",
        usage="vericache [-h] [--version] COMMAND ...",
        description=f"Lossless KV-cache compression.\n\ncommands:\n{commands}",
        epilog="vericache COMMAND --help says more about one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"vericache {__version__}")
    return parser


def _show_traceback() -> None:
    if debug_enabled():
        traceback.print_exc()


if __name__ == "__main__":
    sys.exit(main())
