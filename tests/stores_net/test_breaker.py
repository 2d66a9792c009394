# mypy: disable-error-code="comparison-overlap,unreachable"
from __future__ import annotations

from tests.stores_net.servers import FakeClock
from vericache_core.stores.breaker import CircuitBreaker


def admitted(breaker: CircuitBreaker) -> int:
    ticket = breaker.admit()
    assert ticket is not None
    return ticket


def opened(clock: FakeClock) -> CircuitBreaker:
    breaker = CircuitBreaker(failures=3, rest=5.0, clock=clock.now)
    for _ in range(3):
        breaker.failed(admitted(breaker))
    assert breaker.state == "open"
    return breaker


def test_opens_after_failures_in_a_row_only() -> None:
    breaker = CircuitBreaker(failures=3, rest=5.0, clock=FakeClock().now)
    for _ in range(4):
        breaker.failed(admitted(breaker))
        breaker.failed(admitted(breaker))
        breaker.succeeded(admitted(breaker))
    assert (breaker.state, breaker.opened) == ("closed", 0)


def test_refuses_while_it_rests_then_lets_one_probe_through() -> None:
    clock = FakeClock()
    breaker = opened(clock)
    assert breaker.refuses
    assert breaker.admit() is None
    clock.advance(4.999)
    assert breaker.admit() is None
    clock.advance(0.001)
    assert not breaker.refuses
    probe = admitted(breaker)
    assert breaker.state == "half-open"
    assert breaker.refuses
    assert breaker.admit() is None
    breaker.succeeded(probe)
    assert (breaker.state, breaker.refuses, breaker.opened) == ("closed", False, 1)


def test_a_failed_probe_opens_it_again() -> None:
    clock = FakeClock()
    breaker = opened(clock)
    clock.advance(5)
    breaker.failed(admitted(breaker))
    assert (breaker.state, breaker.opened) == ("open", 2)
    clock.advance(4)
    assert breaker.admit() is None
    clock.advance(1)
    assert breaker.admit() is not None


def test_a_probe_that_was_not_made_leaves_its_place() -> None:
    clock = FakeClock()
    breaker = opened(clock)
    clock.advance(5)
    breaker.withdrawn(admitted(breaker))
    assert breaker.admit() is not None
    assert breaker.opened == 1


def test_outcomes_from_before_a_change_of_state_do_not_count() -> None:
    clock = FakeClock()
    breaker = CircuitBreaker(failures=1, rest=5.0, clock=clock.now)
    old = [admitted(breaker) for _ in range(3)]
    breaker.failed(old[0])
    clock.advance(5)
    probe = admitted(breaker)
    breaker.succeeded(old[1])
    assert breaker.state == "half-open"
    breaker.failed(old[2])
    assert breaker.state == "half-open"
    breaker.succeeded(probe)
    assert breaker.state == "closed"
