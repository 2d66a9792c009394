"""Prefixes on the drafting side: which part of a prompt is shared, and what of it has come over the link."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from vericache_core.cache.draft import DraftKV
from vericache_core.cache.pages import PagedRows

SHORTEST: Final = 64
"""Tokens that prompts must have in common before that counts as a shared prefix."""
KEPT: Final = 16
"""Prefixes that are kept for later requests."""


@dataclass(eq=False)
class Local:
    """A prefix, or as much of it as has come.

    Attributes:
        draft: its compressed KV, complete; requests draft on twins of it.
        rows: its full KV by layer, complete, where that was asked for.
        fetching: what is on its way: ``prefix``, ``rows``.
        users: requests that lean on it.
    """

    ids: tuple[int, ...]
    draft: DraftKV | None = None
    rows: Mapping[int, PagedRows] | None = None
    fetching: set[str] = field(default_factory=set)
    users: int = 0


class Prefixes:
    """Prefixes by token ids; those that no request uses go when there are too many."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._held: OrderedDict[tuple[int, ...], Local] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def of(self, prompt: Sequence[int], others: Sequence[Sequence[int]]) -> Local:
        """The prefix that ``prompt`` leans on; it gets one more user.

        The longest that is here already; else what it has in common with most of the ``others`` that came with it;
        else all of it but the last token, which must be computed anyway. What is shorter than half of the prompt does
        not count: the rest is computed on both sides.
        """
        ids = tuple(prompt)
        least = max(SHORTEST, len(ids) // 2)
        known = [held for held in self._held if least <= len(held) < len(ids) and ids[: len(held)] == held]
        best = max(known, key=len, default=())
        if not best:
            shared = [length for length in (common(ids, other) for other in others) if length >= least]
            # What most have in common, rather than a few tokens more with one of them: each prefix crosses the link.
            length = max(set(shared), key=lambda n: (n * sum(other >= n for other in shared), n), default=len(ids) - 1)
            best = ids[:length]
        found = self._held.setdefault(best, Local(best))
        self._held.move_to_end(best)
        found.users += 1
        return found

    def leave(self, prefix: Local) -> None:
        """One user less."""
        prefix.users -= 1
        for ids in list(self._held):
            if len(self._held) <= self._kept:
                return
            if not self._held[ids].users:
                del self._held[ids]

    def forget(self, prefix: Local) -> None:
        """Its KV is of no use, such as when the store has changed; those who use it keep what they have."""
        self._held.pop(prefix.ids, None)

    def clear(self) -> None:
        """Forget everything."""
        self._held.clear()


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that two prompts begin with alike; at most all but the last of each."""
    most = min(len(one), len(other)) - 1
    count = 0
    while count < most and one[count] == other[count]:
        count += 1
    return count


class Backoff:
    """Whether a link that failed should be tried again: later and later, at most every ``longest`` seconds."""

    def __init__(self, first: float = 1.0, longest: float = 60.0) -> None:
        self._first, self._longest = first, longest
        self._wait, self._until = 0.0, 0.0

    @property
    def open(self) -> bool:
        """Whether it may be tried now."""
        return time.monotonic() >= self._until

    def failed(self) -> None:
        """It failed."""
        self._wait = min(self._longest, max(self._first, 2 * self._wait))
        self._until = time.monotonic() + self._wait

    def worked(self) -> None:
        """It works."""
        self._wait = self._until = 0.0
