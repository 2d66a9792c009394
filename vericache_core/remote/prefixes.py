"""Prefixes on the drafting side: which part of a prompt is shared, and what of it has come over the link."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from vericache_core.cache.draft import DraftKV
from vericache_core.cache.pages import PagedRows

if TYPE_CHECKING:
    from vericache_core.remote.receive import Delivery

SHORTEST: Final = 64
"""Tokens that prompts must have in common before that counts as a shared prefix."""
NAMED: Final = 64
"""Prefixes that are remembered for later requests, however little of them is here."""


@dataclass(eq=False)
class Local:
    """A prefix, or as much of it as has come.

    Attributes:
        draft: its compressed KV, complete; requests draft on twins of it.
        rows: its full KV by layer, complete, where that was asked for.
        fetching: what takes in what is on its way: ``prefix``, ``rows``.
        sizes: device bytes of what has come, by the same names.
        expected: device bytes of what is to come, as far as requests have claimed room for it.
        users: requests that lean on it.
    """

    ids: tuple[int, ...]
    draft: DraftKV | None = None
    rows: Mapping[int, PagedRows] | None = None
    fetching: dict[str, Delivery] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    expected: dict[str, float] = field(default_factory=dict)
    users: int = 0

    @property
    def busy(self) -> bool:
        """Whether it must stay: a request leans on it, or some of it is still coming in."""
        return self.users > 0 or bool(self.fetching)

    @property
    def nbytes(self) -> int:
        """Device bytes of what has come."""
        return sum(self.sizes.values())

    @property
    def claimed(self) -> float:
        """Device bytes of what has come, and of what is expected."""
        return sum({**self.expected, **self.sizes}.values())

    def take(self, draft: DraftKV | None, rows: Mapping[int, PagedRows]) -> None:
        """Its compressed KV has come, or else its full KV."""
        if draft is not None:
            self.draft, self.sizes["prefix"] = draft, draft.device_bytes
        else:
            self.rows, self.sizes["rows"] = rows, sum(pages.nbytes for pages in rows.values())


class Prefixes:
    """Prefixes by token ids; :meth:`trim` bounds what those take that no request uses."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[int, ...], Local] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Device bytes of all of them."""
        return sum(prefix.nbytes for prefix in self._held.values())

    @property
    def claimed(self) -> float:
        """Device bytes, here or expected, of those that must stay."""
        return sum(prefix.claimed for prefix in self._held.values() if prefix.busy)

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

    def trim(self, most_bytes: float) -> None:
        """Let the least recently used go until those that nothing uses take at most ``most_bytes`` of the device."""
        idle = [prefix for prefix in self._held.values() if not prefix.busy]
        held, named = sum(prefix.nbytes for prefix in idle), len(idle)
        for prefix in idle:
            if (held > most_bytes and prefix.nbytes) or named > NAMED:
                del self._held[prefix.ids]
                held, named = held - prefix.nbytes, named - 1

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
