"""``--timeout-factor``: the one argument by which a busy machine gives checks more time."""

from __future__ import annotations

import argparse
import math

from vericache_core.errors import UsageError


def add_timeout_factor(parser: argparse.ArgumentParser) -> None:
    """Declare the argument."""
    parser.add_argument("--timeout-factor", type=float, default=1.0, metavar="X", help="multiplies the timeout of every check")


def timeout_factor(args: argparse.Namespace) -> float:
    """The factor asked for; a :class:`UsageError` unless it is positive and finite."""
    factor: float = args.timeout_factor
    if not (math.isfinite(factor) and factor > 0):
        raise UsageError(f"--timeout-factor must be positive and finite, not {factor:g}", hint="write 4 on a busy machine")
    return factor
