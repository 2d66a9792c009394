from __future__ import annotations

import itertools
import random
from typing import Any

from vericache_core.runtime.rings import Rings

USUAL: dict[str, Any] = {"step": 1.0, "room": 10.0, "verifies": 1000}


def test_a_lone_verify_gets_the_step_it_wants_and_its_swap_ends_just_before() -> None:
    rings = Rings()
    assert rings.reserve(1, 12, 2.5, 4.0, **USUAL)
    found = rings.get(1)
    assert found is not None
    assert (found.verify, found.start) == (12, 9)
    assert found.link == {11: 1.0, 10: 1.0, 9: 0.5}


def test_a_swap_that_cannot_be_done_in_time_moves_the_verify_back() -> None:
    rings = Rings()
    assert rings.reserve(1, 1, 5.0, 4.0, **USUAL)
    found = rings.get(1)
    assert found is not None
    assert (found.verify, found.start) == (5, 0)


def test_the_next_ones_go_beside_the_first_as_link_and_bytes_allow() -> None:
    rings = Rings()
    for number in range(4):
        assert rings.reserve(number, 12, 2.0, 4.0, **USUAL)
        rings.check_integrity()
    places = sorted(found.verify for number in range(4) if (found := rings.get(number)))
    assert len(set(places)) == 4
    assert all(6 <= place <= 19 for place in places)
    tight = Rings()
    for number in range(4):
        assert tight.reserve(number, 12, 2.0, 6.0, **USUAL)
    spans = sorted((found.start, found.verify) for number in range(4) if (found := tight.get(number)))
    assert all(before[1] < after[0] for before, after in itertools.pairwise(spans))


def test_without_room_there_is_no_place_and_nothing_changes() -> None:
    rings = Rings()
    assert not rings.reserve(1, 5, 1.0, 11.0, **USUAL)
    assert rings.get(1) is None
    rings.check_integrity()
    assert rings.reserve(2, 5, 0.0, 0.0, **{**USUAL, "room": -1.0})


def test_verifies_are_spread() -> None:
    rings = Rings()
    for number in range(3):
        assert rings.reserve(number, 9, 0.0, 0.0, **{**USUAL, "verifies": 1})
    places = [found.verify for number in range(3) if (found := rings.get(number))]
    assert places == [9, 8, 10]


def test_a_swap_longer_than_the_horizon_finds_a_place() -> None:
    rings = Rings()
    assert rings.reserve(1, 5, 300.0, 1.0, **USUAL)
    found = rings.get(1)
    assert found is not None
    assert found.verify == 300


def test_a_postponed_verify_keeps_its_bytes() -> None:
    rings = Rings()
    assert rings.reserve(1, 1, 1.0, 6.0, **USUAL)
    rings.advance()
    rings.postpone(1)
    rings.check_integrity()
    rings.advance()
    assert rings.reserve(2, 1, 1.0, 6.0, **USUAL)
    found = rings.get(2)
    assert found is not None
    assert found.start == 3  # the first still holds its bytes at step 2


def test_rings_hold_what_is_reserved_through_any_order_of_calls() -> None:
    numbers, rings = random.Random(1), Rings()
    for _ in range(500):
        choice = numbers.random()
        if choice < 0.5:
            rings.reserve(
                numbers.randrange(12),
                numbers.randrange(20),
                numbers.uniform(0, 4),
                numbers.uniform(0, 5),
                **{**USUAL, "verifies": numbers.randrange(1, 4)},
            )
        elif choice < 0.7:
            rings.cancel(numbers.randrange(12))
        else:
            for number in range(12):
                found = rings.get(number)
                if found is not None and found.verify <= rings.now:
                    rings.postpone(number)
            rings.advance()
        rings.check_integrity()
    for number in range(12):
        rings.cancel(number)
    assert all(abs(value) < 1e-9 for ring in (rings._link, rings._bytes, rings._verifies) for value in ring.values())
