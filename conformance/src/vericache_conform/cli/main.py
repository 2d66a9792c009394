"""Entry point of ``vericache-conform``.

Exit codes are pytest's: 0 fine, 1 failures, 2 interrupted, 3 bug of the suite, 4 usage, 5 nothing ran.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from vericache_conform._version import __version__
from vericache_core.cli.boundary import ExitCodes, Program
from vericache_core.errors import UsageError

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
FAILED: Final = 1
INTERRUPTED: Final = 2
INTERNAL: Final = 3
USAGE: Final = 4
_CODES: Final = ExitCodes(lambda error: USAGE if isinstance(error, UsageError) else FAILED, INTERRUPTED, FAILED, INTERNAL)
_ABOUT: Final = "May this compressor be trusted, and if not, why?"
PROGRAM: Final = Program(
    "vericache-conform", __version__, _ABOUT, COMMANDS, "vericache_conform.cli", _CODES, "this is a bug of the suite"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; never raises for an expected error."""
    return PROGRAM.run(argv)


if __name__ == "__main__":
    sys.exit(main())
