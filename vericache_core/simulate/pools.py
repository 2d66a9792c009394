"""Device memory of a fleet: what a prefix takes is taken once for all requests that use it at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from vericache_core.simulate.fleet import Fleet, Path, drafter_bytes
from vericache_core.simulate.nodes import Wire

STORE: Final = -1
"""Place: the device beside the store, what plain requests and streams may use of it."""
HELD: Final = -2
"""Place: the part of it that holds full KV for requests whose drafts it verifies."""


@dataclass(eq=False)
class Prefix:
    """A prompt's KV at one place.

    Attributes:
        users: requests that use it.
        arrives: when it has come.
        nbytes: that it takes.
    """

    users: int
    arrives: float
    nbytes: float

    @property
    def share(self) -> float:
        """Bytes of one user."""
        return self.nbytes / self.users


class Pools:
    """Free bytes by place: drafters from 0 on, ``STORE`` and ``HELD``."""

    def __init__(self, fleet: Fleet, held: float) -> None:
        self._fleet = fleet
        self._size = dict.fromkeys(range(fleet.drafters), fleet.memory) | {STORE: fleet.memory - held, HELD: held}
        self.free = dict(self._size)
        self.peak = dict.fromkeys(self.free, 0.0)
        self._prefixes: dict[tuple[int, str, int], Prefix] = {}

    def has(self, prefix: int, path: Path, place: int) -> bool:
        """Whether that prompt's KV is there, or on its way, in the form that the path needs."""
        return (prefix, _form(path), place) in self._prefixes

    def needs(self, prefix: int, path: Path, place: int, prompt: int, new_tokens: int) -> float:
        """Bytes that one more request would take."""
        own = self._fleet.full_bytes(new_tokens)
        return own if self.has(prefix, path, place) else own + self._prefix_bytes(path, place, prompt)

    def take(
        self, prefix: int, path: Path, place: int, prompt: int, new_tokens: int, wire: Wire, nbytes: float
    ) -> tuple[Prefix, bool]:
        """Take them; a prefix that is not there is sent for over ``wire``. Returns it, and whether it was sent for."""
        self.free[place] -= self.needs(prefix, path, place, prompt, new_tokens)
        self.peak[place] = max(self.peak[place], self._size[place] - self.free[place])
        key, fresh = (prefix, _form(path), place), not self.has(prefix, path, place)
        if fresh:
            self._prefixes[key] = Prefix(0, wire.send(nbytes), self._prefix_bytes(path, place, prompt))
        self._prefixes[key].users += 1
        return self._prefixes[key], fresh

    def give(self, prefix: int, path: Path, place: int, new_tokens: int) -> None:
        """Give them back; the last user of a prefix gives back that, too."""
        key = prefix, _form(path), place
        found = self._prefixes[key]
        found.users -= 1
        self.free[place] += self._fleet.full_bytes(new_tokens)
        if not found.users:
            self.free[place] += self._prefixes.pop(key).nbytes

    def _prefix_bytes(self, path: Path, place: int, prompt: int) -> float:
        return self._fleet.full_bytes(prompt) if place < 0 else drafter_bytes(self._fleet, path, prompt, 0)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless no place is overcommitted and, with no prefix left, everything is free."""
        for place, free in self.free.items():
            assert -1e-6 * self._size[place] <= free <= self._size[place] * (1 + 1e-6), (place, free)
            if not self._prefixes:
                assert abs(free - self._size[place]) <= 1e-6 * max(1.0, self._size[place])


def _form(path: Path) -> str:
    return "verify" if path.startswith("verify") else "stream" if path.startswith("stream") else path
