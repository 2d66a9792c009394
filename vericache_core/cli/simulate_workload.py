"""The requests that ``vericache simulate`` runs: of a trace, or drawn by number, rate and lengths."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final

from vericache_core.errors import UsageError
from vericache_core.runtime.trace import Arrival, poisson, read_trace

MOST_REQUESTS: Final = 10_000
REQUESTS: Final = 48
PROMPT_TOKENS: Final = "30000"
NEW_TOKENS: Final = 500
"""What is simulated without a trace."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare when requests come and how long they are."""
    parser.add_argument("--requests", type=int, metavar="N", help=f"[{REQUESTS}]")
    parser.add_argument("--rate", type=float, metavar="R", help="arrivals a second, Poisson; 0: all at once [0]")
    parser.add_argument("--prompt-tokens", metavar="N[-M]", help=f"[{PROMPT_TOKENS}]")
    parser.add_argument("--new-tokens", type=int, metavar="N", help=f"[{NEW_TOKENS}]")
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="arrivals as JSON lines: at, prompt_tokens, new_tokens, priority, hazard; in place of the four above",
    )


def arrivals(args: argparse.Namespace, hazards: Sequence[float]) -> list[Arrival]:
    """The requests, in the order of their arrival; ``hazards`` are dealt to drawn ones in turn.

    Raises:
        UsageError: the flags conflict or are out of range.
    """
    if args.trace:
        for name in ("requests", "rate", "prompt_tokens", "new_tokens"):
            if getattr(args, name) is not None:
                raise UsageError(f"--trace and --{name.replace('_', '-')} exclude each other", hint="the trace says it")
        return read_trace(args.trace)
    requests = REQUESTS if args.requests is None else args.requests
    if requests > MOST_REQUESTS:
        raise UsageError(f"--requests: expected at most {MOST_REQUESTS}, got {requests}")
    tokens = PROMPT_TOKENS if args.prompt_tokens is None else args.prompt_tokens
    low, _, high = tokens.partition("-")
    try:
        lengths = int(low), int(high or low)
    except ValueError:
        raise UsageError(f"--prompt-tokens: expected N or N-M, got {tokens!r}") from None
    new_tokens = NEW_TOKENS if args.new_tokens is None else args.new_tokens
    return poisson(args.rate or 0.0, requests, lengths, new_tokens, list(hazards), args.seed)
