"""Single steps, with a scheduler that plans what it is told to."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import pytest

from vericache_core.errors import VeriCacheError
from vericache_core.runtime.costs import CostModel, Link
from vericache_core.runtime.hazard import Prior
from vericache_core.runtime.lockstep import LockstepScheduler
from vericache_core.runtime.modes import Mode
from vericache_core.runtime.schedulable import Bytes, Part, StepPlan
from vericache_core.runtime.timeline import Span
from vericache_core.runtime.trace import Arrival
from vericache_core.runtime.window import Experience, WindowController
from vericache_core.simulate.clock import Simulation
from vericache_core.simulate.compare import Setup, simulate
from vericache_core.simulate.compression import Compression
from vericache_core.simulate.lookup import Lookup
from vericache_core.simulate.request import SimulatedRequest

COSTS = CostModel({8: 1.0}, read=0.001, pair=0.01, links={"host": Link(0.0, 0.01)}, layers=10)


class Scripted(LockstepScheduler):
    def __init__(self, plans: list[StepPlan], device: float) -> None:
        super().__init__(Bytes(device))
        self.plans = plans

    def plan(self, now: float) -> StepPlan:
        self.running, self.waiting = [*self.running, *self.waiting], []
        return self.plans.pop(0) if self.plans else StepPlan()


def simulation(
    plans: list[StepPlan], mode: Mode = "offloaded", count: int = 2, device: float = 1e9, **more: float
) -> Simulation:
    """Requests of 100 tokens, a byte a token: 50 bytes of draft KV, and 50 to swap in, half a second of link time."""
    requests = [
        SimulatedRequest(
            number,
            Arrival(0.0, 100, 50),
            Compression(0.5, 0.0),
            1,
            COSTS,
            mode=mode,
            tier="host",
            window=2,
            experience=None,
            prefill=False,
            seed=0,
        )
        for number in range(count)
    ]
    found = Simulation(COSTS, Scripted(plans, device), requests, **more)  # type: ignore[arg-type]
    with pytest.raises(VeriCacheError, match="stands still"):
        found.run()
    return found


def left(found: Simulation) -> list[float | None]:
    return [found._requests[number].link_left for number in sorted(found._requests)]


def test_swaps_share_one_link_in_the_order_given() -> None:
    draft = (Part(0, "draft", 1),)
    found = simulation([StepPlan(parts=draft, streams=(2, 1, 0))], count=3)
    # A step of 1.05 seconds: two whole swaps, and what is left for the third.
    assert left(found) == pytest.approx([0.45, 0.0, 0.0])
    assert found.result.seconds == 0  # only a run that ends says how long it took
    assert found.now == pytest.approx(1.05)
    assert found.result.swap_seconds == pytest.approx(1.5)
    assert found.result.exposed_seconds == 0
    assert found.result.peak_kv_bytes == pytest.approx(3 * 50 + 3 * 50)


def test_a_verify_waits_for_what_is_missing_and_hides_the_rest() -> None:
    found = simulation(
        [
            StepPlan(parts=(Part(0, "draft", 1),)),
            StepPlan(parts=(Part(0, "draft", 1),)),
            StepPlan(parts=(Part(0, "verify", 3),), streams=(0,)),
        ]
    )
    compute = 1.0 + math.hypot(100 * 0.001, 3 * 101.5 * 0.01)
    assert found.now == pytest.approx(2 * 1.05 + compute + 0.5 / 10)
    assert found.result.exposed_seconds == pytest.approx(0.05)
    assert found._requests[0].committed == 3
    assert found.result.windows == [2]
    assert found.result.accepted == 2


def test_cores_that_copy_do_not_compute_meanwhile_and_the_host_takes_a_moment_between_steps() -> None:
    plan = StepPlan(parts=(Part(0, "verify", 1), Part(1, "draft", 1)), streams=(0,))
    found = simulation([plan], copies=0.004, between=0.25)
    compute = 1.0 + (100 + 50) * 0.001 + 50 * 0.004
    assert found.now == pytest.approx(compute + 0.5 / 10 + 2 * 0.25)
    assert found.result.exposed_seconds == pytest.approx(0.05)  # the host's moment is nobody's swap


def test_a_plain_token_of_offloaded_kv_is_swapped_in() -> None:
    found = simulation([StepPlan(parts=(Part(0, "decode", 1),))])
    assert found.now == pytest.approx(1.0 + 100 * 0.001 + 0.05)
    assert found.result.swap_seconds == pytest.approx(0.5)
    assert found._requests[0].committed == 1


def test_plain_tokens_of_offloaded_kv_that_have_no_room_together_take_turns() -> None:
    """Each holds 100 bytes of draft KV at its greatest length, and lacks 50 of its full KV."""
    both = StepPlan(parts=(Part(0, "decode", 1), Part(1, "decode", 1)))
    tokens = []
    for device in (299.0, 300.0):
        found = simulation([both], device=device)
        tokens.append([found._requests[number].committed for number in (0, 1)])
    assert tokens == [[1, 0], [1, 1]]


def test_pages_are_reserved_beyond_the_length() -> None:
    kept, bare = (
        SimulatedRequest(
            0,
            Arrival(0.0, 100, 50),
            Compression(0.5, 0.0),
            2,
            COSTS,
            mode="pinned",
            tier="host",
            window=2,
            experience=None,
            prefill=False,
            seed=0,
            page=page,
        ).holds.device
        for page in (16, 0)
    )
    assert bare == 2 * (150 + 100)
    assert kept == bare + 2 * (16 + 16)


def test_drafts_read_the_draft_kv_and_plain_rows_the_full_one() -> None:
    parts = (Part(0, "draft", 1), Part(1, "draft", 1))
    assert simulation([StepPlan(parts=parts)], "pinned").now == pytest.approx(1.0 + 2 * 50 * 0.001)
    parts = (Part(0, "decode", 1), Part(1, "decode", 1))
    assert simulation([StepPlan(parts=parts)], "plain").now == pytest.approx(1.0 + 2 * 100 * 0.001)


def test_a_preempted_request_starts_over() -> None:
    plans = [
        StepPlan(parts=(Part(0, "decode", 1),)),
        StepPlan(preempt=(0,), parts=(Part(1, "decode", 1),)),
        StepPlan(parts=(Part(0, "prefill", 8),)),
    ]
    found = simulation(plans, "plain")
    assert found._requests[0].prefill == 101 - 8  # its prompt and the token it had written
    assert found._requests[0].committed == 1


@pytest.mark.parametrize("mode", ["plain", "pinned", "offloaded"])
def test_a_step_carries_no_more_rows_than_it_has(mode: Mode) -> None:
    """Drafted verifies, prefills and proposals beside each other; what does not fit goes on in the next step."""
    rows: dict[float, int] = defaultdict(int)

    def note(span: Span) -> None:
        if span.kind != "swap" and not span.background:
            rows[span.start] += span.rows

    arrivals = [Arrival(0.5 * number, 40, 60) for number in range(6)]
    window = 0 if mode == "plain" else 20
    facts: dict[str, Any] = {"mode": mode, "window": window, "rows": 16, "prefill": True, "compression": Compression(0.5, 0.1)}
    found = simulate(Setup(COSTS, 1, Bytes(1e9), arrivals, lookups=[Lookup((0.8,), (0.1,))], **facts), note)
    assert max(rows.values()) == 16
    assert found.tokens == 6 * 60
    assert mode == "plain" or max(found.windows) > 16  # rounds longer than a step


def test_a_verify_that_does_not_fit_goes_on_in_the_next_step() -> None:
    """Twenty drafts, all right, and sixteen rows: a token of each row, then the four that are left and one more."""
    drafts = [StepPlan(parts=(Part(0, "draft", 1),))] * 20
    verify = StepPlan(parts=(Part(0, "verify", 21),))
    cut = simulation([*drafts, verify], "pinned", rows=16)
    request = cut._requests[0]
    assert (request.committed, request.drafts, request.window, cut.result.windows) == (16, 4, 4, [])
    whole = simulation([*drafts, verify, StepPlan(parts=(Part(0, "decode", 1),))], "pinned", rows=16)
    assert (whole._requests[0].committed, whole.result.windows, whole.result.accepted) == (21, [20], 20)
    even = simulation([*drafts[:16], verify], "pinned", rows=16)  # no row is left to say what comes after the drafts
    assert (even._requests[0].committed, even._requests[0].drafts, even.result.windows) == (16, 0, [16])


def test_a_request_brings_its_grant_when_it_arrives_and_takes_the_rest_of_it_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody's drafts ever gain is lost on the first one's account alone while it is there alone."""
    shared: list[Experience] = []

    def noted(prior: Prior | None) -> Experience:
        shared.append(Experience(prior))
        return shared[-1]

    def close(controller: WindowController) -> None:
        closed.append(controller)

    closed: list[WindowController] = []
    monkeypatch.setattr("vericache_core.simulate.compare.Experience", noted)
    monkeypatch.setattr(WindowController, "close", close)
    facts: dict[str, Any] = {"mode": "pinned", "compression": Compression(0.5, 1.0), "prior": Prior(0.1, 8.0)}
    cheap = CostModel({1: 1.0, 8: 1.05, 64: 1.3}, read=0.004, pair=0.0)
    runs = {}
    for others in (0, 30):
        arrivals = [Arrival(0.0, 100, 128), *(Arrival(1e6, 100, 2) for _ in range(others))]
        runs[others] = simulate(Setup(cheap, 1, Bytes(1e9), arrivals, **facts))
    assert runs[0].windows
    assert runs[0].latencies[0] == runs[30].latencies[0]
    assert len({id(controller) for controller in closed}) == len(closed) == 1 + 31
    assert [each.ledger._granted for each in shared] == [0.0, 0.0]  # answers of full length leave nothing to give back
