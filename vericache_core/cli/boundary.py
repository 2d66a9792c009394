"""What every command line of ours does around its commands: find one, import only that, turn errors into lines and codes.

A command is a module with ``add_arguments(parser)`` and ``run(args) -> int``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

from vericache_core.cli.output import debug_enabled, report_error
from vericache_core.cli.parser import Parser
from vericache_core.errors import UsageError, VeriCacheError
from vericache_core.plugins.fields import did_you_mean


@dataclass(frozen=True)
class ExitCodes:
    """What a program ends with.

    Attributes:
        of: the code of an error that was expected.
        interrupted: after Ctrl-C.
        broken_pipe: when whoever reads its output has gone.
        internal: after a bug.
    """

    of: Callable[[VeriCacheError], int]
    interrupted: int
    broken_pipe: int
    internal: int


@dataclass(frozen=True)
class Program:
    """A command line.

    Attributes:
        name, version, description: for ``--help`` and ``--version``.
        commands: each command and its line in ``--help``.
        package: where their modules are.
        codes: exit codes.
        bug: what a person is told to think of an error that nobody expected.
    """

    name: str
    version: str
    description: str
    commands: Mapping[str, str]
    package: str
    codes: ExitCodes
    bug: str = "this is a bug"

    def run(self, argv: Sequence[str] | None = None) -> int:
        """Run one command line and return its exit code; never raises for an expected error."""
        try:
            try:
                code = self._dispatch(list(sys.argv[1:] if argv is None else argv))
            except SystemExit as done:  # argparse after --help or --version
                code = done.code if isinstance(done.code, int) else 0
            sys.stdout.flush()  # here, so that a closed pipe is noticed inside the try
        except VeriCacheError as error:
            _show_traceback()
            report_error(error.message, cause=error.cause, hint=error.hint)
            return self.codes.of(error)
        except KeyboardInterrupt:
            _show_traceback()
            print(f"{self.name}: interrupted", file=sys.stderr)
            return self.codes.interrupted
        except BrokenPipeError:
            # The reader has gone (`vericache ... | head`). Python flushes stdout once more at exit and would complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return self.codes.broken_pipe
        except Exception as error:  # noqa: BLE001  # the last line of defence: a bug is reported, not dumped
            _show_traceback()
            hint = None if debug_enabled() else f"{self.bug}; VERICACHE_DEBUG=1 shows the traceback"
            report_error(f"internal error: {type(error).__name__}: {error}", hint=hint)
            return self.codes.internal
        return code

    def _dispatch(self, argv: list[str]) -> int:
        if not argv or argv[0].startswith("-"):
            self._root_parser().parse_args(argv or ["--help"])
            return 0
        module, args = self.parse(argv)
        code: int = module.run(args)
        return code

    def parse(self, argv: Sequence[str]) -> tuple[ModuleType, argparse.Namespace]:
        """The module of a command, and its arguments; what the command does not take is a ``UsageError``."""
        command, *rest = argv
        if command not in self.commands:
            near = did_you_mean(command, self.commands)
            suffix = f"; did you mean {near!r}?" if near else ""
            raise UsageError(f"unknown command {command!r}{suffix}", hint=f"commands: {', '.join(self.commands)}")
        module = importlib.import_module(f"{self.package}.{command}")
        parser = Parser(prog=f"{self.name} {command}", description=self.commands[command])
        module.add_arguments(parser)
        return module, parser.parse_args(rest)

    def _root_parser(self) -> Parser:
        width = max(map(len, self.commands))
        commands = "\n".join(f"  {name.ljust(width)}  {summary}" for name, summary in self.commands.items())
        parser = Parser(
            prog=self.name,
            usage=f"{self.name} [-h] [--version] COMMAND ...",
            description=f"{self.description}\n\ncommands:\n{commands}",
            epilog=f"{self.name} COMMAND --help says more about one.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("--version", action="version", version=f"{self.name} {self.version}")
        return parser


def _show_traceback() -> None:
    if debug_enabled():
        traceback.print_exc()
