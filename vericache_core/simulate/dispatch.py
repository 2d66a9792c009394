"""Which device takes on which request of a fleet, and on which path."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from vericache_core.runtime.trace import Arrival
from vericache_core.simulate.fleet import Fleet, Path, Plan
from vericache_core.simulate.nodes import Live, Wire
from vericache_core.simulate.pools import HELD, STORE, Pools

SLACK: Final = 4
"""Prompts' worth of requests by which a path may be ahead of its share."""


@dataclass(eq=False)
class FleetRequest:
    """A request on its path."""

    number: int
    arrival: Arrival
    prefix: int
    path: Path = "remote"
    places: tuple[int, ...] = ()
    live: Live | None = None
    whole: bool = False
    held_from: float = 0.0
    committed: int = 0

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of its prompt and of its answer."""
        return self.arrival.prompt_tokens, self.arrival.new_tokens


class Dispatcher:
    """Hands out requests in the order of their arrival.

    A device takes on another one when it has room and its link nearly nothing to do.

    Args:
        fleet, plan: what there is, and shares of the paths.
        pools: memory by place.
        wires: to the drafters.
        start: called with a request, its path and its places, the drafter or the store first.

    Attributes:
        taken: requests by path.
        loading: full KV on its way to plain requests beside the store; the caller counts it.
    """

    def __init__(
        self,
        fleet: Fleet,
        plan: Plan,
        pools: Pools,
        wires: Sequence[Wire],
        start: Callable[[FleetRequest, Path, tuple[int, ...]], None],
    ) -> None:
        self._fleet, self._plan, self._pools, self._wires, self._start = fleet, plan, pools, wires, start
        self.taken: Counter[Path] = Counter()
        self.loading = 0
        self._queue: deque[FleetRequest] = deque()
        self._homes: dict[int, tuple[Path, tuple[int, ...]]] = {}
        self._behind: dict[int | Path, deque[FleetRequest]] = defaultdict(deque)  # by device, without affinity by path

    @property
    def waiting(self) -> int:
        """Requests that nobody has taken on."""
        return len(self._queue) + sum(map(len, self._behind.values()))

    def arrive(self, request: FleetRequest) -> None:
        """Queue it, and hand out what finds room."""
        self._queue.append(request)
        self.fill()

    def fill(self) -> None:
        """Hand out requests for as long as somebody takes one: the path that lags its share most goes first.

        Requests that share a prompt follow the first of them, to its device or without affinity on its path only, and
        others wait behind them for that.
        """
        for behind in list(self._behind.values()):
            while behind and (place := self._follow(behind[0])) is not None:
                self._take(behind.popleft(), *place)
        while self._queue:
            request = self._queue[0]
            home = self._homes.get(request.prefix)
            if home is None:
                total = 1 + sum(self.taken.values())
                lags = {path: self._plan.share(path) * total - self.taken[path] for path in self._plan.rates}
                # A path far beyond its share would take from others what the plan counts on.
                allowed = [path for path in lags if lags[path] > -SLACK * self._fleet.sharing]
                for path in sorted(allowed, key=lambda path: -lags[path]):
                    places = self._find_place(request, path)
                    if places is not None:
                        home = path, places
                        break
                else:
                    return
            self._queue.popleft()
            line = self._line(*home)
            found = None if line else home if request.prefix not in self._homes else self._follow(request)
            if found is None:
                line.append(request)
            else:
                self._take(request, *found)

    def _line(self, path: Path, places: tuple[int, ...]) -> deque[FleetRequest]:
        """Who waits for what a request at ``places`` waits for."""
        return self._behind[places[0] if self._fleet.affinity else path]

    def _follow(self, request: FleetRequest) -> tuple[Path, tuple[int, ...]] | None:
        """Where a request goes whose prompt others brought before it; None if there is no room yet."""
        path, places = self._homes[request.prefix]
        if self._fleet.affinity:
            return (path, places) if self._has_room(request, path, places) else None
        found = self._find_place(request, path, follows=True)
        return None if found is None else (path, found)

    def _find_place(self, request: FleetRequest, path: Path, *, follows: bool = False) -> tuple[int, ...] | None:
        """The device with the most room for it, for which nobody waits unless it ``follows``; None if there is none now."""
        if path == "remote":
            choices: list[tuple[int, ...]] = [(STORE,)]
        else:
            more = (HELD,) if path in {"verify", "stream"} else ()
            order = sorted(range(self._fleet.drafters), key=lambda place: (-self._pools.free[place], place))
            choices = [(place, *more) for place in order]
        free = (places for places in choices if follows or not self._line(path, places))
        return next((places for places in free if self._has_room(request, path, places)), None)

    def _has_room(self, request: FleetRequest, path: Path, places: tuple[int, ...]) -> bool:
        for place in places:
            needs = self._pools.needs(request.prefix, path, place, *request.lengths)
            if path == "remote":
                needs += self._plan.streamed  # so that verifies go on
            if self._pools.free[place] < needs:
                return False
        if self._pools.has(request.prefix, path, places[0]) and (self._fleet.affinity or places[0] == STORE):
            return True
        waiting = self.loading if path == "remote" else self._wires[places[0]].waiting
        return waiting <= self._fleet.ahead

    def _take(self, request: FleetRequest, path: Path, places: tuple[int, ...]) -> None:
        self._homes[request.prefix] = path, places
        self.taken[path] += 1
        self._start(request, path, places)
