from __future__ import annotations

import random

import pytest

from tests.runtime.scheduling import Machine, Toy, toys
from vericache_core.errors import ConfigError
from vericache_core.runtime.admission import AdmissionPolicy, QueueFull, admit
from vericache_core.runtime.lockstep import LockstepScheduler
from vericache_core.runtime.schedulable import Bytes
from vericache_core.runtime.scheduler import Roster, StaggeredScheduler

BOTH = pytest.mark.parametrize("kind", [StaggeredScheduler, LockstepScheduler])


def machine(scheduler: StaggeredScheduler | LockstepScheduler, requests: dict[int, Toy]) -> Machine:
    for toy in requests.values():
        scheduler.submit(toy)
    return Machine(scheduler, requests)


@BOTH
@pytest.mark.parametrize("seed", range(8))
def test_every_request_finishes_within_the_budgets_whatever_comes(kind: type[StaggeredScheduler], seed: int) -> None:
    """Arrivals and cancellations at random; the machine checks rows, phases and budgets of every plan."""
    budget, numbers = Bytes(12.0, 15.0, 0.0), random.Random(seed)
    requests = toys(40, seed)
    scheduler = kind(budget, rows=48, policy=AdmissionPolicy(aging=20.0))
    late = [requests.pop(number) for number in range(20, 40)]
    m = machine(scheduler, requests)
    for _ in range(4000):
        if late and numbers.random() < 0.2:
            toy = late.pop()
            requests[toy.number] = toy
            scheduler.submit(toy)
        if requests and numbers.random() < 0.01:
            gone = numbers.choice(list(requests))
            scheduler.remove(gone)
            del requests[gone]
        m.run(1, budget, rows=48)
        if isinstance(scheduler, StaggeredScheduler):
            scheduler.check_integrity()
        if not requests and not late:
            break
    assert not requests
    assert not scheduler.running
    assert not scheduler.waiting


def offloaded(count: int, **fixed: object) -> dict[int, Toy]:
    values: dict[str, object] = {
        "drafting": True,
        "window": 12,
        "link_seconds": 2.0,
        "transient": 4.0,
        "holds": Bytes(1.0, 0.0, 0.0),
        "priority": 0,
        "prompt": 0,
        "to_do": 200,
        "arrival": 0.0,
    }
    return toys(count, 0, **{**values, **fixed})


def test_staggered_swaps_hide_behind_drafts_where_lock_step_exposes_them() -> None:
    exposed = {}
    for kind in (StaggeredScheduler, LockstepScheduler):
        m = machine(kind(Bytes(200.0)), offloaded(6))
        m.run(400)
        assert len(m.finished) == 6
        swaps = sum(part.phase == "verify" for plan in m.log for part in plan.parts)
        exposed[kind] = m.exposed / (2.0 * swaps)
    assert exposed[StaggeredScheduler] < 0.1
    assert exposed[LockstepScheduler] > 0.8


def test_staggered_swaps_hold_few_caches_at_a_time() -> None:
    peak = {}
    for kind in (StaggeredScheduler, LockstepScheduler):
        m = machine(kind(Bytes(200.0)), offloaded(6))
        m.run(300)
        m.log = m.log[20:]  # the first steps have no length to plan with
        peak[kind] = max(len(plan.streams) for plan in m.log)
    assert peak[LockstepScheduler] == 6
    assert peak[StaggeredScheduler] <= 2


def test_with_room_for_one_swap_only_all_still_go_on() -> None:
    m = machine(StaggeredScheduler(Bytes(10.0)), offloaded(6))
    m.run(700, Bytes(10.0))
    assert len(m.finished) == 6
    assert max(len(plan.streams) for plan in m.log) == 1


def test_verifies_are_spread_over_the_steps() -> None:
    """Pinned requests of one window would otherwise all verify in the same step, eight times 17 rows."""
    m = machine(StaggeredScheduler(), offloaded(8, link_seconds=0.0, transient=0.0, window=16))
    m.run(200)
    rows = [sum(part.rows for part in plan.parts if part.phase == "verify") for plan in m.log]
    assert max(rows) <= 2 * 17
    staggered = [part.rows for plan in m.log for part in plan.parts if part.phase == "verify"]
    assert sum(staggered) / len(staggered) > 12  # near the window all the same


def test_windows_follow_the_request() -> None:
    requests = offloaded(1, link_seconds=0.0, transient=0.0, window=5, to_do=1000)
    m = machine(StaggeredScheduler(), requests)
    m.run(6)
    assert [[part.phase for part in plan.parts] for plan in m.log] == [["draft"]] * 5 + [["verify"]]
    requests[0].window = 1
    m.run(2)
    assert [plan.parts[0].phase for plan in m.log[6:]] == ["draft", "verify"]
    requests[0].window = 0
    m.run(2)
    assert [plan.parts[0].phase for plan in m.log[8:]] == ["decode", "decode"]


def test_the_last_token_is_not_drafted() -> None:
    m = machine(StaggeredScheduler(), offloaded(1, link_seconds=0.0, transient=0.0, to_do=1))
    m.run(1)
    assert [part.phase for part in m.log[0].parts] == ["decode"]


@BOTH
def test_prefill_shares_steps_with_decoding(kind: type[StaggeredScheduler]) -> None:
    requests = offloaded(2, link_seconds=0.0, transient=0.0, window=2)
    requests[1].prefill = 100
    m = machine(kind(rows=32), requests)
    m.run(3, rows=32)
    assert all({part.phase for part in plan.parts} >= {"prefill"} for plan in m.log)
    assert all(len(plan.parts) == 2 for plan in m.log)
    assert all(plan.rows == 32 for plan in m.log)


def test_no_prefill_starves_among_many_decoding_and_none_of_those_among_prefills() -> None:
    requests = offloaded(60, link_seconds=0.0, transient=0.0, drafting=False, window=0, to_do=10_000)
    for number in (0, 1):
        requests[number].prefill = 100_000
    m = machine(StaggeredScheduler(rows=16), requests)
    m.run(60, rows=16)
    assert all(sum(part.rows for part in plan.parts if part.phase == "prefill") == 4 for plan in m.log)
    served = [part.number for plan in m.log for part in plan.parts]
    counts = [served.count(number) for number in range(60)]
    assert min(counts) >= 12 * 60 // 58


def test_a_verify_that_does_not_fit_waits_whole() -> None:
    roster = Roster(rows=16)
    first, second, third, single = Toy(0, drafts=9), Toy(1, drafts=9), Toy(2, drafts=2), Toy(3)
    parts = roster.fill([first, second, third], [single])
    assert [(part.number, part.rows) for part in parts] == [(0, 10), (2, 3), (3, 1)]


def test_single_rows_keep_a_share_of_a_step_full_of_verifies() -> None:
    roster = Roster(rows=16)
    parts = roster.fill([Toy(number, drafts=3) for number in range(10)], [Toy(number) for number in range(10, 20)])
    assert [part.phase for part in parts].count("verify") == 3
    assert [part.phase for part in parts].count("draft") == 4


def test_a_verify_whose_swap_is_late_does_not_hold_the_others_up() -> None:
    requests = offloaded(2, link_seconds=2.0, to_do=60)
    requests[2] = Toy(2, drafting=False, window=0, to_do=10_000)  # it could always go on
    scheduler = StaggeredScheduler(Bytes(50.0), step_seconds=1.0)
    m = machine(scheduler, requests)
    m.speed = 0.5
    for _ in range(150):
        m.run(1, Bytes(50.0))
        scheduler.check_integrity()
    assert m.exposed == 0
    assert sorted(m.finished) == [0, 1]


def test_swaps_under_way_count_when_others_are_let_in() -> None:
    running = [Toy(number, transient=3.0, link_seconds=1.0) for number in range(2)]
    new = [Toy(9)]
    assert admit(new, running, Bytes(8.0, 1.0, 0.0), 0.0, AdmissionPolicy()).start == (9,)
    assert admit(new, running, Bytes(8.0, 1.0, 0.0), 0.0, AdmissionPolicy(), {0: 3.0, 1: 3.0}).start == ()


def test_an_older_equal_does_not_preempt_one_that_overtook_it() -> None:
    older, younger = Toy(0, arrival=0.0, holds=Bytes(3.0, 0.0, 0.0)), Toy(1, arrival=50.0)
    assert not admit([older], [younger], Bytes(3.0, 1.0, 0.0), 60.0, AdmissionPolicy()).preempt


def test_lock_step_verifies_in_turns_when_room_is_short_and_drafts_after_the_last() -> None:
    requests = offloaded(3, link_seconds=1.0, window=2, to_do=100)
    requests[3] = Toy(3, drafting=False, window=0, to_do=100)
    m = machine(LockstepScheduler(Bytes(12.0)), requests)
    m.run(5, Bytes(12.0))
    assert [{part.number: part.phase for part in plan.parts if part.number < 3} for plan in m.log] == [
        {0: "draft", 1: "draft", 2: "draft"},
        {0: "draft", 1: "draft", 2: "draft"},
        {0: "verify", 1: "verify"},
        {2: "verify"},
        {0: "draft", 1: "draft", 2: "draft"},
    ]
    assert all(any(part.number == 3 and part.phase == "decode" for part in plan.parts) for plan in m.log)


def test_lock_step_forgets_a_request_that_is_cancelled_while_it_waits_to_verify() -> None:
    m = machine(LockstepScheduler(Bytes(7.5)), offloaded(3, link_seconds=1.0, window=1))
    m.run(2)
    m.scheduler.remove(2)
    del m.requests[2]
    m.run(2)
    assert [part.phase for part in m.log[2].parts] == ["verify"]
    assert [part.phase for part in m.log[3].parts] == ["draft", "draft"]


def test_an_offloaded_request_that_does_not_draft_streams_for_every_token() -> None:
    m = machine(StaggeredScheduler(Bytes(20.0)), offloaded(1, drafting=False, window=0, to_do=5))
    m.run(30)
    assert m.finished == [0]
    parts = [part for plan in m.log for part in plan.parts]
    assert [(part.phase, part.rows) for part in parts] == [("verify", 1)] * 5


def test_priorities_preempt_and_the_preempted_resume() -> None:
    requests = offloaded(3, link_seconds=0.0, transient=0.0, holds=Bytes(4.0, 0.0, 0.0), prompt=10, to_do=60)
    requests[2].priority = 5
    last = requests.pop(2)
    scheduler = StaggeredScheduler(Bytes(9.0), policy=AdmissionPolicy(aging=1e9))
    m = machine(scheduler, requests)
    m.run(5, Bytes(9.0))
    assert {toy.number for toy in scheduler.running} == {0, 1}
    requests[2] = last
    scheduler.submit(last)
    m.run(1, Bytes(9.0))
    assert m.log[-1].start == (2,)
    assert m.log[-1].preempt == (1,)
    m.run(400, Bytes(9.0))
    assert m.finished.index(2) < m.finished.index(1)
    assert len(m.finished) == 3


def test_equals_do_not_preempt_and_waiting_raises_priority() -> None:
    requests = offloaded(30, link_seconds=0.0, transient=0.0, holds=Bytes(4.0, 0.0, 0.0), to_do=30)
    for number, toy in requests.items():
        toy.priority = 0 if number == 0 else 1
        toy.arrival = 0.0 if number == 0 else number * 3.0
    scheduler = StaggeredScheduler(Bytes(4.5), policy=AdmissionPolicy(aging=40.0))
    m = machine(scheduler, requests)
    m.run(2500)
    assert not any(plan.preempt for plan in m.log[1:] if 0 not in plan.preempt)
    assert m.finished.index(0) < 25  # not last, though all others had the higher priority
    assert len(m.finished) == 30


def test_small_requests_overtake_a_large_one_only_for_a_while() -> None:
    small = {number: Toy(number, arrival=0.0, to_do=10, holds=Bytes(1.0, 0.0, 0.0)) for number in range(1, 60)}
    large = Toy(0, arrival=0.0, to_do=10, holds=Bytes(3.5, 0.0, 0.0))
    scheduler = StaggeredScheduler(Bytes(4.0), policy=AdmissionPolicy(patience=6.0, aging=1e9))
    blocker = Toy(99, arrival=-1.0, to_do=8, holds=Bytes(1.0, 0.0, 0.0))
    m = machine(scheduler, {99: blocker, 0: large, **small})
    m.run(400)
    place = m.finished.index(0)
    assert 3 <= place < 30


def test_the_queue_is_bounded_and_refuses_politely() -> None:
    scheduler = StaggeredScheduler(Bytes(1.0), policy=AdmissionPolicy(queue=2))
    scheduler.submit(Toy(0))
    scheduler.submit(Toy(1))
    with pytest.raises(QueueFull, match="2 requests are waiting") as caught:
        scheduler.submit(Toy(2))
    assert caught.value.hint == "try again later"
    scheduler.remove(1)
    scheduler.submit(Toy(3))


def test_a_request_that_can_never_fit_is_refused_at_once() -> None:
    scheduler = StaggeredScheduler(Bytes(10.0, 5.0, 0.0))
    with pytest.raises(ConfigError, match="device budget"):
        scheduler.submit(Toy(0, holds=Bytes(7.0, 0.0, 0.0), transient=4.0, link_seconds=1.0))
    with pytest.raises(ConfigError, match="host budget"):
        scheduler.submit(Toy(0, holds=Bytes(7.0, 6.0, 0.0)))
    assert not scheduler.waiting


def test_the_number_that_run_is_bounded() -> None:
    scheduler = StaggeredScheduler(policy=AdmissionPolicy(running=3))
    m = machine(scheduler, offloaded(10, link_seconds=0.0, transient=0.0, to_do=20))
    m.run(3)
    assert len(scheduler.running) == 3
    m.run(300)
    assert len(m.finished) == 10


def test_an_empty_roster_has_nothing_to_do() -> None:
    for scheduler in (StaggeredScheduler(), LockstepScheduler()):
        plan = scheduler.plan(0.0)
        assert not plan.parts
        scheduler.done(plan, 1.0)
    assert Roster().room == float("inf")
