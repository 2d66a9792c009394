"""Thousands of requests on a fleet of drafters and one store, under a virtual clock."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from vericache_core.errors import ConfigError, VeriCacheError
from vericache_core.runtime.trace import Arrival
from vericache_core.simulate.dispatch import Dispatcher, FleetRequest
from vericache_core.simulate.fleet import PLAIN, Fleet, Path, Plan, make_plan
from vericache_core.simulate.nodes import Clock, Drafter, Live, Verifier, Wire
from vericache_core.simulate.pools import HELD, STORE, Pools, Prefix

MARGIN: Final = 1.05
"""How much faster than plain decoding a plan that drafts must look: plans are within a few percent of what runs give."""


@dataclass
class FleetResult:
    """What a run gave. Seconds are virtual, bytes are those that crossed a link.

    Attributes:
        tokens: committed.
        steady_tokens_per_s: between the first and the last fifth of all tokens, when every device has work.
        seconds: from the first arrival to the last token.
        paths: requests by path.
        drafted, accepted: tokens of all verifies.
        slow_bytes, fast_bytes: over all slow links, and the fast one.
        busy: share of the time that each kind of resource worked, on average of its kind.
        peak_drafter_bytes: most KV on one drafter.
        latencies, first_tokens: from arrival, of each request.
    """

    plan: Plan
    tokens: int = 0
    steady_tokens_per_s: float = 0.0
    seconds: float = 0.0
    paths: Counter[Path] = field(default_factory=Counter)
    drafted: int = 0
    accepted: int = 0
    verifies: int = 0
    slow_bytes: float = 0.0
    fast_bytes: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)
    peak_drafter_bytes: float = 0.0
    latencies: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """Throughput of the fleet."""
        return self.tokens / self.seconds if self.seconds else 0.0


class FleetSimulation:
    """Runs requests to their end.

    Args:
        fleet: what there is.
        arrivals: in order; ``fleet.sharing`` of them in a row have one prompt.
        seed: of the accepted drafts.
        plan: shares of the paths; None for those that promise most.

    Raises:
        ConfigError: a request fits nowhere.
    """

    def __init__(self, fleet: Fleet, arrivals: Sequence[Arrival], seed: int = 0, plan: Plan | None = None) -> None:
        self.fleet, self.plan = fleet, best_plan(fleet, arrivals) if plan is None else plan
        if not self.plan.rate:
            raise ConfigError("no path has room for a request", hint="more memory, shorter prompts, or other paths")
        self.clock, self.result = Clock(), FleetResult(self.plan)
        self._seed, self._coming = seed, [FleetRequest(n, a, n // fleet.sharing) for n, a in enumerate(arrivals)]
        self._fast = Wire(self.clock, fleet.fast)
        self._slow = [Wire(self.clock, fleet.slow) for _ in range(fleet.drafters)]
        self._drafters = [Drafter(self.clock, fleet.costs, self._asked, self._plain_token) for _ in range(fleet.drafters)]
        self.pools = Pools(fleet, self.plan.held)
        self._dispatcher = Dispatcher(fleet, self.plan, self.pools, self._slow, self._start)
        self._store = Verifier(self.clock, fleet.costs, self._fast, self.pools.free[STORE], self._store_token)
        self._requests: dict[int, FleetRequest] = {}
        self._jobs: dict[int, FleetRequest] = {}
        self._riding: dict[int, int] = {}
        self._whole_from: dict[tuple[int, int], float] = {}
        self._numbers: dict[int, random.Random] = {}
        whole = sum(arrival.new_tokens for arrival in arrivals)
        self._steady, self._steady_from = (whole // 5, whole - whole // 5), (0, 0.0)

    def run(self) -> FleetResult:
        """Run to the end."""
        start = self._coming[0].arrival.at
        for request in self._coming:
            self.clock.at(request.arrival.at, lambda request=request: self._dispatcher.arrive(request))  # type: ignore[misc]
        self.clock.run()
        result = self.result
        waiting = self._dispatcher.waiting + len(self._requests)
        if waiting:
            raise VeriCacheError("the simulation stands still", cause=f"{waiting} requests wait")
        result.slow_bytes, result.fast_bytes = sum(wire.nbytes for wire in self._slow), self._fast.nbytes
        result.verifies, result.paths = self._store.verifies, self._dispatcher.taken
        result.peak_drafter_bytes = max(self.pools.peak[place] for place in range(len(self._slow)))
        result.seconds -= start
        span, many = max(result.seconds, 1e-12), len(self._slow)
        result.busy = {
            "slow link": sum(wire.busy for wire in self._slow) / many / span,
            "fast link": self._fast.busy / span,
            "store device": self._store.busy / span,
            "drafter device": sum(drafter.busy for drafter in self._drafters) / many / span,
        }
        return result

    # -- taking a request on -------------------------------------------------------------------------

    def _start(self, request: FleetRequest, path: Path, places: tuple[int, ...]) -> None:
        request.path, request.places = path, places
        self._requests[request.number] = request
        self._numbers[request.number] = random.Random(f"{self._seed} {request.number}")  # noqa: S311  (a simulation)
        prompt, new_tokens = request.lengths
        whole, fleet, place = self.fleet.full_bytes(prompt), self.fleet, places[0]
        if path == "remote":
            self._dispatcher.loading += 1
            there, _ = self.pools.take(request.prefix, path, STORE, prompt, new_tokens, self._fast, whole)
            self.clock.at(there.arrives, lambda: self._decode_at_store(request, there))
            return
        if HELD in places:
            there, _ = self.pools.take(request.prefix, path, HELD, prompt, new_tokens, self._fast, whole)
            request.held_from = there.arrives  # before that it is no use to ask
        request.live = Live(request.number, new_tokens, window=self.plan.window)
        wire = self._slow[place]
        first = whole if path == "fetch" else whole * fleet.compression.keep
        here, fresh = self.pools.take(request.prefix, path, place, prompt, new_tokens, wire, first)
        self.clock.at(here.arrives, lambda: self._loaded(request))
        if path.startswith("stream"):
            if fresh:
                self._whole_from[request.prefix, place] = wire.send(fleet.following_bytes(prompt))
            self.clock.at(self._whole_from[request.prefix, place], lambda: self._made_whole(request))

    def _loaded(self, request: FleetRequest) -> None:
        if request.path == "fetch":
            self._decode_at_drafter(request)
        else:
            self._draft(request)
        self._dispatcher.fill()  # the link has one transfer less to do

    # -- drafting and verifying ----------------------------------------------------------------------

    def _draft(self, request: FleetRequest) -> None:
        assert request.live is not None
        live, prompt = request.live, request.arrival.prompt_tokens
        if request.whole:
            self._decode_at_drafter(request)
            return
        live.phase, live.drafts = "drafting", 0
        live.reads = self.fleet.draft_bytes(prompt) + self.fleet.full_bytes(live.committed)
        self._drafters[request.places[0]].run(live)

    def _asked(self, live: Live) -> None:
        request = self._requests[live.number]
        when = max(self.clock.now + self.fleet.slow.latency, request.held_from)
        self.clock.at(when, lambda: self._verify(request))

    def _verify(self, request: FleetRequest) -> None:
        assert request.live is not None
        tokens, rows = request.arrival.prompt_tokens + request.live.committed, request.live.drafts + 1

        def done() -> None:
            self.clock.at(self.clock.now + self.fleet.slow.latency, lambda: self._verdict(request))

        stream = HELD not in request.places
        if stream and self._store.join(self._riding.get(request.prefix, -1), rows, done):
            return
        number = self._store.verify(tokens, self.fleet.full_bytes(tokens), rows, done, stream=stream)
        if stream:
            self._riding[request.prefix] = number

    def _verdict(self, request: FleetRequest) -> None:
        assert request.live is not None
        live, accepted = request.live, 0
        hazard = self.fleet.compression.hazard if request.arrival.hazard is None else request.arrival.hazard
        while accepted < live.drafts and self._numbers[request.number].random() >= hazard:
            accepted += 1
        self.result.drafted += live.drafts
        self.result.accepted += accepted
        live.committed += accepted + 1
        self._committed(request, accepted + 1)
        if live.committed >= request.arrival.new_tokens:
            self._end(request)
        else:
            self._draft(request)

    def _made_whole(self, request: FleetRequest) -> None:
        request.whole = True  # from its next verdict on it decodes plainly
        self._dispatcher.fill()

    # -- plain decoding ------------------------------------------------------------------------------

    def _decode_at_drafter(self, request: FleetRequest) -> None:
        assert request.live is not None
        live = request.live
        live.phase, live.reads = "plain", self.fleet.full_bytes(request.arrival.prompt_tokens + live.committed)
        self._drafters[request.places[0]].run(live)

    def _plain_token(self, live: Live) -> None:
        request = self._requests[live.number]
        live.committed += 1
        live.reads += self.fleet.token_bytes
        self._committed(request, 1)
        if live.committed >= request.arrival.new_tokens:
            self._end(request)

    def _decode_at_store(self, request: FleetRequest, prefix: Prefix) -> None:
        self._dispatcher.loading -= 1
        prompt, new_tokens = request.lengths
        number = self._store.decode(
            prompt, self.fleet.full_bytes(prompt + new_tokens), self.fleet.full_bytes(new_tokens), prefix
        )
        self._jobs[number] = request
        self._dispatcher.fill()

    def _store_token(self, number: int) -> None:
        request = self._jobs[number]
        request.committed += 1
        self._committed(request, 1)
        if request.committed >= request.arrival.new_tokens:
            self._store.finish(number)
            del self._jobs[number]
            self._end(request)

    # -- accounts ------------------------------------------------------------------------------------

    def _committed(self, request: FleetRequest, tokens: int) -> None:
        if len(self.result.first_tokens) <= request.number:
            self.result.first_tokens += [-1.0] * (request.number + 1 - len(self.result.first_tokens))
        if self.result.first_tokens[request.number] < 0:
            self.result.first_tokens[request.number] = self.clock.now - request.arrival.at
        before = self.result.tokens
        self.result.tokens += tokens
        self.result.seconds = self.clock.now
        first, last = self._steady
        if before <= first < self.result.tokens:
            self._steady_from = self.result.tokens, self.clock.now
        if before < last <= self.result.tokens:
            count, since = self._steady_from
            self.result.steady_tokens_per_s = (self.result.tokens - count) / max(self.clock.now - since, 1e-12)

    def _end(self, request: FleetRequest) -> None:
        self.result.latencies.append(self.clock.now - request.arrival.at)
        if request.live is not None:
            self._drafters[request.places[0]].leave(request.live)
        for place in request.places:
            self.pools.give(request.prefix, request.path, place, request.arrival.new_tokens)
        del self._requests[request.number], self._numbers[request.number]
        self._dispatcher.fill()


def mean_lengths(arrivals: Sequence[Arrival]) -> tuple[int, int]:
    """Tokens of the prompts and of the answers, on average.

    Raises:
        ConfigError: there are no requests.
    """
    if not arrivals:
        raise ConfigError("a simulation needs a request")
    prompt = sum(arrival.prompt_tokens for arrival in arrivals) / len(arrivals)
    return round(prompt), round(sum(arrival.new_tokens for arrival in arrivals) / len(arrivals))


def best_plan(fleet: Fleet, arrivals: Sequence[Arrival]) -> Plan:
    """The plan with the highest rate; one that drafts must look ``MARGIN`` times as fast as plain decoding."""
    lengths = mean_lengths(arrivals)
    plan = make_plan(fleet, *lengths)
    plain = make_plan(fleet, *lengths, [path for path in PLAIN if path in fleet.paths])
    return plain if plan.rate < MARGIN * plain.rate else plan


def simulate_fleet(fleet: Fleet, arrivals: Sequence[Arrival], seed: int = 0, plan: Plan | None = None) -> FleetResult:
    """Run the requests on the fleet; see :class:`FleetSimulation`."""
    return FleetSimulation(fleet, arrivals, seed, plan).run()
