"""Proposers under the drafter: guesses that cost no model step, checked many rows at a time by the next stage.

A drafter with a proposer runs the newest token and the proposed ones in one step over the compressed KV and keeps
those that it would have drafted itself; without a drafter the full KV checks the proposals. Either way the verify is the
same, so a proposer changes speed only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Proposer(Protocol):
    """Guesses how a sequence goes on."""

    def propose(self, tokens: Sequence[int], drafts: Sequence[int], most: int) -> list[int]:
        """Up to ``most`` tokens that may follow ``tokens`` (committed, growing) and ``drafts`` (provisional)."""

    def told(self, proposed: int, accepted: int) -> None:
        """The next stage agreed with the first ``accepted`` of ``proposed``."""


class NGramProposer:
    """Prompt lookup: what followed the last occurrence of the newest n tokens (A. Saxena, "Prompt Lookup Decoding", 2023).

    Longer n-grams are tried first. How much is proposed follows what was accepted lately: each full success
    doubles it, each failure halves it.

    Args:
        longest, shortest: n.
        most: tokens proposed at a time.
    """

    def __init__(self, longest: int = 4, shortest: int = 2, most: int = 10) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._most = most
        self._length = 4
        self._seen: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def propose(self, tokens: Sequence[int], drafts: Sequence[int], most: int) -> list[int]:
        self._index(tokens)
        end = [*tokens[-self._sizes[0] :], *drafts][-self._sizes[0] :]
        count = min(most, self._length)
        for size in self._sizes:
            at = self._seen.get(tuple(end[-size:])) if len(end) >= size else None
            if at is not None and count > 0:
                return list(tokens[at : at + count])
        return []

    def told(self, proposed: int, accepted: int) -> None:
        if accepted >= proposed:
            self._length = min(self._most, 2 * self._length)
        else:
            self._length = max(1, self._length // 2, min(accepted + 1, self._most))

    def _index(self, tokens: Sequence[int]) -> None:
        """Remember where each n-gram was followed last; the newest token has no successor yet."""
        for stop in range(max(self._indexed, 1), len(tokens)):
            for size in self._sizes:
                if stop >= size:
                    self._seen[tuple(tokens[stop - size : stop])] = stop
        self._indexed = max(self._indexed, len(tokens))
