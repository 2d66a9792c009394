"""Verifies with slow swaps in the simulator: beside the steps of others, one at a time, as the engine runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.drafters import Oracle, drafting
from tests.models import VOCAB, build, prompt
from vericache_core import Engine, EngineConfig, SamplingParams
from vericache_core.runtime.costs import CostModel, Link
from vericache_core.runtime.observer import LoopObserver
from vericache_core.runtime.schedulable import Bytes
from vericache_core.runtime.timeline import Span
from vericache_core.runtime.trace import Arrival
from vericache_core.simulate.compare import Setup, simulate
from vericache_core.simulate.compression import Compression

LAYERS = 10
# A step takes 1 second, a swap of 50 bytes 5; a byte a token.
COSTS = CostModel({64: 1.0}, read=0.0, pair=0.0, links={"host": Link(0.0, 0.1)}, layers=LAYERS)
PLENTY = Bytes(1e9, 1e9, 1e9)


def setup(requests: int, new_tokens: int = 61, **changes: object) -> Setup:
    arrivals = [Arrival(0.0, 100, new_tokens) for _ in range(requests)]
    made = Setup(COSTS, 1, PLENTY, arrivals, Compression(0.5, 0.0, ring=2), "offloaded", window=12, rows=64, running=requests)
    return replace(made, **changes)  # type: ignore[arg-type]


def in_background(spans: Sequence[Span]) -> list[Span]:
    return [span for span in spans if span.background]


def drafts_beside(spans: Sequence[Span], flight: Span) -> list[Span]:
    """Draft rows of other requests in steps that ran while ``flight`` was under way."""
    return [one for one in spans if one.kind == "draft" and flight.start < one.end and one.start < flight.end]


def test_a_slow_swap_runs_beside_the_drafts_of_others_and_is_hidden_by_them() -> None:
    spans: list[Span] = []
    beside = simulate(setup(3), spans.append)
    waited = simulate(setup(3, background=False))
    assert beside.tokens == waited.tokens == 3 * 61
    assert beside.background > 0
    assert waited.background == 0
    assert beside.seconds < waited.seconds
    assert beside.swap_hidden_fraction is not None
    assert waited.swap_hidden_fraction is not None
    assert beside.swap_hidden_fraction > waited.swap_hidden_fraction
    flights = in_background(spans)
    assert len(flights) == beside.background
    for one, following in pairwise(flights):
        assert one.end <= following.start  # there is one link
    for flight in flights:
        assert flight.number not in {span.number for span in drafts_beside(spans, flight)}
    assert sum(bool(drafts_beside(spans, flight)) for flight in flights) > len(flights) / 2


def test_time_on_the_link_is_the_floor_and_what_nobody_hides_is_exposed() -> None:
    found = simulate(setup(3))
    assert found.seconds >= found.swap_seconds
    assert found.exposed_seconds <= found.seconds
    alone = simulate(setup(1))
    assert alone.background == 0  # who verifies alone holds up nobody
    assert alone.swap_hidden_fraction is not None
    assert alone.swap_hidden_fraction < 0.2


def test_a_background_verify_takes_its_share_of_the_device() -> None:
    costs = replace(COSTS, pair=0.002)
    spans: list[Span] = []
    simulate(setup(3, costs=costs), spans.append)
    flight = in_background(spans)[0]
    compute = 1.0 + 0.002 * flight.rows * (100 + flight.rows / 2)
    assert flight.end - flight.start == pytest.approx(costs.overlapped(compute, 5.0))  # layers are computed as they come in
    inside = [one for one in drafts_beside(spans, flight) if one.start >= flight.start and one.end <= flight.end]
    assert inside
    for one in inside:
        assert one.end - one.start == pytest.approx(1.0 / (1 - compute / (flight.end - flight.start)))


def test_a_link_that_keeps_up_needs_no_background() -> None:
    fast = replace(COSTS, links={"host": Link(0.0, 0.01)})
    assert simulate(setup(3, costs=fast)).background == 0


class Heard(LoopObserver):
    def __init__(self, spans: list[Span]) -> None:
        self._spans = spans

    def happened(self, span: Span) -> None:
        self._spans.append(span)


@pytest.mark.parametrize("order", ["staggered", "lockstep"])
def test_simulator_and_engine_do_the_same_things(order: str) -> None:
    """Equal requests, every draft accepted, a link far slower than a step: no clock is compared, only what happened."""
    window, new_tokens, prompts = 5, 25, [prompt(96, seed=seed) for seed in range(4)]
    params, model = SamplingParams(max_new_tokens=new_tokens), build("llama")
    with Engine(model, config=EngineConfig(rows=16, probe=False)) as plain:
        right = {tuple(ids): out.token_ids for ids, out in zip(prompts, plain.generate(prompts, params), strict=True)}
        token_bytes = sum(layer.token_bytes for layer in plain.adapter.layers)
        layers = len(plain.adapter.layers)
    swap = 0.5 * 96 * token_bytes
    seconds = 0.06  # of a swap: a step takes a few milliseconds
    config = EngineConfig(
        rows=16,
        probe=False,
        compressor="random",
        keep=0.5,
        window=window,
        scheduler=order,  # type: ignore[arg-type]
        link_bytes_per_s=swap / seconds,
    )
    measured: list[Span] = []
    with Engine(model, config=config) as ours, drafting(Oracle(right, VOCAB)):
        ours.loop.observer = Heard(measured)
        outputs = ours.generate(prompts, params)
    assert [output.token_ids for output in outputs] == list(right.values())
    measured = [span for span in measured if span.kind != "prefill"]

    simulated: list[Span] = []
    costs = CostModel({16: 0.004}, 0.0, 0.0, {"host": Link(0.0, seconds / swap)}, layers)
    # The engine's prefill has given the first token already.
    arrivals = [Arrival(0.0, 97, new_tokens - 1) for _ in prompts]
    made = Setup(costs, token_bytes, PLENTY, arrivals, Compression(0.5, 0.0, ring=2), "offloaded", window, rows=64)
    made = replace(made, order=order, running=len(prompts))  # type: ignore[arg-type]
    simulate(made, simulated.append)

    for spans in (measured, simulated):
        flights = in_background(spans)
        assert bool(flights) == (order == "staggered")  # in lock step nobody drafts on meanwhile
        # A last token, for which nothing is worth drafting, may have to swap alone; any other verify checks drafts.
        assert all(span.kind == "verify" or span is newest(spans, span.number) for span in flights)
        for one, following in pairwise(flights):
            assert one.end <= following.start
    assert sum(span.background for span in measured) >= sum(span.background for span in simulated) / 2
    found, expected = verified_rows(measured), verified_rows(simulated)
    # Requests draft on while they wait for the link, so how many rows a verify has is a matter of clocks.
    assert {sum(rows) for rows in [*found, *expected]} == {new_tokens - 1}  # everything is accepted


def newest(spans: Sequence[Span], number: int) -> Span:
    """What ended last of a request's rows."""
    return max((span for span in spans if span.number == number and span.kind != "swap"), key=lambda span: span.end)


def verified_rows(spans: Sequence[Span]) -> list[list[int]]:
    """Rows of the verifies of each request, in order."""
    numbers = sorted({span.number for span in spans})
    return [[one.rows for one in spans if one.number == number and one.kind in ("verify", "decode")] for number in numbers]
