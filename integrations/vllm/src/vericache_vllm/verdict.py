"""What a verification says, and how it is read from the log-probabilities of a prompt.

The verifier runs ``verified + drafts`` as a prompt. The row at position ``p`` scores the token at ``p + 1``, so the
rows from the last verified token on say what greedy decoding would have chosen in place of each draft, and the token
sampled after the prompt is the bonus.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from vericache_core.errors import RemoteError

VERIFIED = "vericache_verified"
"""Key in a request's ``kv_transfer_params``: how many of its leading tokens are verified."""
PROTOCOL = 1
"""Version of the messages over HTTP; another one is refused."""
PATH = "/vericache/verify"
"""Route over HTTP."""
MOST_BYTES = 1 << 24
"""A message over HTTP that is longer than this is refused before it is read whole, in either direction."""
TopTwo = tuple[tuple[int, float], tuple[int, float]]
"""``((best id, log-probability), (second id, log-probability))`` of one row."""


@dataclass(frozen=True, slots=True)
class Check:
    """One verification: the tokens that stand, and drafts that continue them."""

    verified: Sequence[int]
    drafts: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Answer to one :class:`Check`.

    Attributes:
        accepted: leading drafts that greedy decoding would have chosen.
        token: the token after them; ``None`` if two tokens share the best score there, which log-probabilities cannot
            decide: ask again with the accepted drafts verified and no drafts.
        margins: per decided row the lead of the best token in nats; the smaller, the more it hangs on rounding.
        cached: prompt tokens whose KV came from a cache.
        reruns: times the request was run again without caches because they covered the last verified token.
    """

    accepted: int
    token: int | None
    margins: tuple[float, ...] = ()
    cached: int = 0
    reruns: int = 0


class Verifier(Protocol):
    """Decides what greedy decoding with the full KV commits."""

    @property
    def max_model_len(self) -> int:
        """Most tokens of a request, the sampled one included."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    def verify(self, checks: Sequence[Check]) -> list[Verdict]:
        """Verdicts in the order of ``checks``.

        Raises:
            RemoteError: the engine's answer makes no sense, or it cannot be reached.
        """


def judge(rows: Sequence[TopTwo], drafts: Sequence[int], bonus: int, cached: int = 0, reruns: int = 0) -> Verdict:
    """Compare drafts with what the rows say.

    Args:
        rows: one per draft: the two best tokens in its place.
        drafts: proposed tokens.
        bonus: what was sampled after the last draft.
        cached: passed on.
        reruns: passed on.

    Raises:
        RemoteError: rows are missing, not in order, or not finite.
    """
    if len(rows) != len(drafts):
        raise RemoteError(f"verification of {len(drafts)} drafts answered with {len(rows)} rows")
    margins: list[float] = []
    for at, ((best, score), (_, second)) in enumerate(rows):
        if not (math.isfinite(score) and score >= second):
            raise RemoteError(f"verification: row {at} scores its best tokens {score} and {second}")
        if score == second:  # the engine's own argmax has to say which, and it speaks after a prompt only
            return Verdict(at, None, tuple(margins), cached, reruns)
        margins.append(score - second)
        if best != drafts[at]:
            return Verdict(at, best, tuple(margins), cached, reruns)
    return Verdict(len(drafts), bonus, tuple(margins), cached, reruns)
