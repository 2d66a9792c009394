"""Entry point of ``vericache``.

Exit codes: 0 for success, 1 for a failure, 2 for a request that could never have worked, 130 after Ctrl-C.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from vericache_core._version import __version__
from vericache_core.cli.boundary import ExitCodes, Program
from vericache_core.cli.output import show_warnings

COMMANDS: Final = {
    "generate": "write text with a compressed KV cache, token for token what the full one writes",
    "serve": "answer the OpenAI API with one engine: chats and completions, streamed or whole",
    "plugins": "list, check and show compressors; begin a new one",
    "config": "show, validate and describe configuration",
    "store": "serve: hold the full KV of shared prefixes and verify what drafters elsewhere propose",
    "draft": "write with the compressed KV of a shared prefix while a store elsewhere verifies",
    "bench": "measure compressors: bytes, accepted drafts, time, and that the output stays the same",
    "calibrate": "measure what steps, swaps and wrong drafts cost here, for windows and modes that pay",
    "simulate": "what would be gained on some hardware, by the real schedulers under a virtual clock",
    "doctor": "report versions and prove row invariance on this machine",
}
"""Each command and its line in ``--help``; the module is ``vericache_core.cli.<command>``."""

INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141  # what a shell reports for a program that SIGPIPE ended
_CODES: Final = ExitCodes(lambda error: error.exit_code, INTERRUPTED, BROKEN_PIPE, internal=1)
PROGRAM: Final = Program("vericache", __version__, "Lossless KV-cache compression.", COMMANDS, "vericache_core.cli", _CODES)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; never raises for an expected error."""
    show_warnings()
    return PROGRAM.run(argv)


if __name__ == "__main__":
    sys.exit(main())
