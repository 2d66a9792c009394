"""``vericache simulate --proposer``: prompt lookup under the drafter, by how often and how well it proposes."""

from __future__ import annotations

import argparse
import math
from typing import Final

from vericache_core.errors import UsageError
from vericache_core.simulate.lookup import Lookup

SHARE: Final = "0.5"
HAZARD: Final = "0.3"
"""What the engine believes of proposals before it has seen any."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the proposer and how good it is."""
    parser.add_argument(
        "--proposer",
        choices=("none", "ngram"),
        default="none",
        help="ngram: prompt lookup proposes tokens to the drafter, and to the full KV where nothing is drafted [%(default)s]",
    )
    parser.add_argument(
        "--proposal-share",
        default=SHARE,
        metavar="S[,...]",
        help="share of rounds in which it finds anything to propose, dealt to requests in turn [%(default)s]",
    )
    parser.add_argument(
        "--proposal-hazard",
        default=HAZARD,
        metavar="H[,...]",
        help="chance per proposed token to be wrong, dealt to requests in turn [%(default)s]",
    )


def lookups(args: argparse.Namespace) -> tuple[Lookup, ...]:
    """What prompt lookup is to the requests, in turn; none without a proposer.

    Raises:
        UsageError: a number is none or out of range.
    """
    if args.proposer == "none":
        return ()
    shares = _chances("--proposal-share", args.proposal_share)
    hazards = _chances("--proposal-hazard", args.proposal_hazard)
    turns = math.lcm(len(shares), len(hazards))
    return tuple(Lookup((shares[turn % len(shares)],), (hazards[turn % len(hazards)],)) for turn in range(turns))


def _chances(flag: str, text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 <= chance <= 1 for chance in found):
        raise UsageError(f"{flag}: expected numbers from 0 to 1 with commas between them, got {text!r}")
    return found
