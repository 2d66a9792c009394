"""Proposers under the drafter: cheap proposals, checked many rows at a time by the next stage.

A drafter with a proposer runs the newest token and the proposed ones in one step over the compressed KV and keeps
those that it would have drafted itself; without a drafter the full KV checks the proposals (speculation on full KV). Either
way the verify is the same, so a proposer changes speed only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence


class Proposer(ABC):
    """Proposes how one sequence goes on. Whatever it raises costs the proposals, never the request."""

    @abstractmethod
    def propose(self, tokens: Sequence[int], drafts: Sequence[int], most: int) -> list[int]:
        """Up to ``most`` tokens that may follow ``tokens`` (committed, growing) and ``drafts`` (provisional)."""

    @abstractmethod
    def told(self, proposed: int, accepted: int) -> None:
        """The next stage agreed with the first ``accepted`` of ``proposed``."""

    @abstractmethod
    def follow(self, tokens: Sequence[int], count: int) -> None:
        """The full KV has taken in ``count`` of ``tokens`` so far: a chance to keep up with a prefill."""

    def seconds(self, drafts: int) -> float:
        """What proposing in a round of ``drafts`` drafts takes, as far as it was measured."""
        return 0.0

    @property
    def device_bytes(self) -> int:
        """Device KV bytes that it holds between steps."""
        return 0

    def holds(self, tokens: int) -> float:
        """Device KV bytes that it holds at most for a sequence of ``tokens`` tokens."""
        return 0.0

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds; it may be asked again, and begins anew."""


class Length:
    """How many tokens are worth proposing, by what was accepted lately: success doubles it, failure halves it."""

    def __init__(self, most: int, first: int = 4) -> None:
        self._most, self.value = most, first

    def told(self, proposed: int, accepted: int) -> None:
        """See :meth:`Proposer.told`."""
        if accepted >= proposed:
            self.value = min(self._most, 2 * self.value)
        else:
            self.value = max(1, self.value // 2, min(accepted + 1, self._most))


class NGramProposer(Proposer):
    """Prompt lookup: what followed the last occurrence of the newest n tokens (A. Saxena, "Prompt Lookup Decoding", 2023).

    Longer n-grams are tried first.

    Args:
        longest, shortest: n.
        most: tokens proposed at a time.
    """

    def __init__(self, longest: int = 4, shortest: int = 2, most: int = 10) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._length = Length(most)
        self._seen: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def propose(self, tokens: Sequence[int], drafts: Sequence[int], most: int) -> list[int]:
        """See the base."""
        return self.look_up(tokens, drafts, min(most, self._length.value))

    def look_up(self, tokens: Sequence[int], drafts: Sequence[int], most: int) -> list[int]:
        """Up to ``most`` tokens that may follow, however few held lately."""
        self._index(tokens, len(tokens))
        return self._followers(tokens, len(tokens), [*tokens[-self._sizes[0] :], *drafts], most)

    def replay(self, tokens: Sequence[int], start: int, most: int) -> list[tuple[int, int]]:
        """``(proposed, agreed)`` of the rounds that speculation would have taken from ``tokens[start]`` to the end.

        Nothing behind ``start`` may have been proposed for yet: what follows is looked up as it was known then.
        """
        rounds: list[tuple[int, int]] = []
        while start < len(tokens):
            self._index(tokens, start)
            end = tokens[max(0, start - self._sizes[0]) : start]
            found = self._followers(tokens, start, end, min(most, len(tokens) - start))
            agreed = 0
            while agreed < len(found) and found[agreed] == tokens[start + agreed]:
                agreed += 1
            rounds.append((len(found), agreed))
            start += agreed + 1
        return rounds

    def _followers(self, tokens: Sequence[int], known: int, end: Sequence[int], most: int) -> list[int]:
        """What followed the last occurrence of ``end`` in the first ``known`` tokens; where they end, it repeats itself."""
        for size in self._sizes if most > 0 else ():
            at = self._seen.get(tuple(end[-size:])) if len(end) >= size else None
            if at is not None:
                found = list(tokens[at : min(at + most, known)])
                while len(found) < most:
                    found.append(found[at + len(found) - known])
                return found
        return []

    def told(self, proposed: int, accepted: int) -> None:
        """See the base."""
        self._length.told(proposed, accepted)

    def follow(self, tokens: Sequence[int], count: int) -> None:
        """See the base."""
        self._index(tokens, count)

    def close(self) -> None:
        """See the base."""
        self._seen.clear()
        self._indexed = 0

    def _index(self, tokens: Sequence[int], count: int) -> None:
        """Remember where each n-gram of the first ``count`` tokens was followed last; the newest has no successor yet."""
        for stop in range(max(self._indexed, 1), count):
            for size in self._sizes:
                if stop >= size:
                    self._seen[tuple(tokens[stop - size : stop])] = stop
        self._indexed = max(self._indexed, count)
