"""A stand-in for prompt lookup: no text, but for each token of an answer whether there was a proposal and whether it was right.

The engine's own decisions run on top of it: :class:`vericache_core.runtime.speculation.SpeculationPace` says how many
proposals the full KV is asked about, and :class:`vericache_core.runtime.propose.Length` where nothing is chosen by cost. A
text of numbers makes that possible: the right token at a position is the position itself, so a text of ``n`` tokens is
``range(n)``.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from vericache_core.runtime.propose import Length

MOST: Final = 10
"""Proposals at a time where their number follows what was accepted lately, as the engine's prompt lookup has it."""
_WRONG: Final = -1


@dataclass(frozen=True, slots=True)
class Lookup:
    """How good prompt lookup is, by token of an answer; the last entry holds for every token behind it, too.

    Attributes:
        found: chance that a round which begins with this token has anything to propose.
        wrong: chance that a proposal for this token is wrong, if those before it were right.

    Raises:
        ValueError: one of them is no chance, or there is none.
    """

    found: tuple[float, ...] = (0.5,)
    wrong: tuple[float, ...] = (0.3,)

    def __post_init__(self) -> None:
        for name in ("found", "wrong"):
            chances = getattr(self, name)
            if not chances or not all(0 <= chance <= 1 for chance in chances):
                raise ValueError(f"{name}: expected numbers from 0 to 1, got {chances!r}")


class SimulatedLookup:
    """Prompt lookup of one request. What it would say of a token is drawn once, so that asking afterwards gives the same.

    Args:
        chances: of its proposals.
        prompt: tokens of its prompt.
        numbers: that decide.
    """

    def __init__(self, chances: Lookup, prompt: int, numbers: random.Random) -> None:
        self._chances, self._prompt, self._numbers = chances, prompt, numbers
        self._length = Length(MOST)
        self._drawn: list[tuple[bool, bool]] = []  # by token of the answer: anything to propose, and a proposal for it is right

    def propose(self, tokens: Sequence[int], drafts: Sequence[int], most: int) -> list[int]:
        """As many as were accepted lately, ``most`` at most; see :class:`vericache_core.runtime.propose.Proposer`."""
        return self.look_up(tokens, drafts, min(most, self._length.value))

    def told(self, proposed: int, accepted: int) -> None:
        """See :class:`vericache_core.runtime.propose.Proposer`."""
        self._length.told(proposed, accepted)

    def look_up(self, tokens: Sequence[int], drafts: Sequence[int], most: int) -> list[int]:
        """Up to ``most`` tokens that may follow; a proposal never ends by itself."""
        start = len(tokens) + len(drafts)
        if most < 1 or not self._at(start)[0]:
            return []
        return [at if self._at(at)[1] else _WRONG for at in range(start, start + most)]

    def replay(self, tokens: Sequence[int], start: int, most: int) -> list[tuple[int, int]]:
        """See :class:`vericache_core.runtime.speculation.Replayable`."""
        rounds: list[tuple[int, int]] = []
        while start < len(tokens):
            found = self.look_up(range(start), (), min(most, len(tokens) - start))
            rounds.append((len(found), agreed(found, start)))
            start += rounds[-1][1] + 1
        return rounds

    def _at(self, position: int) -> tuple[bool, bool]:
        while len(self._drawn) <= position - self._prompt:
            at = len(self._drawn)
            found = self._numbers.random() < _by_token(self._chances.found, at)
            right = self._numbers.random() >= _by_token(self._chances.wrong, at)
            self._drawn.append((found, right))
        return self._drawn[position - self._prompt]


def agreed(proposed: Sequence[int], start: int) -> int:
    """How many of ``proposed`` are right, the first being for the token at ``start``."""
    count = 0
    while count < len(proposed) and proposed[count] == start + count:
        count += 1
    return count


def _by_token(chances: Sequence[float], at: int) -> float:
    return chances[min(at, len(chances) - 1)]
