from __future__ import annotations

import math

import pytest

from vericache_core.runtime.ledger import Ledger


def test_credit_is_the_tolerated_share_and_what_was_gained() -> None:
    ledger = Ledger()
    ledger.grant(100)
    assert ledger.credit(0.02) == 2.0
    ledger.enter(3, -1.5, granted=3)
    assert ledger.credit(0.02) == 0.5
    ledger.enter(10, 4.0, granted=10)
    assert ledger.credit(0.02) == 4.5


def test_tokens_count_once_and_those_beyond_the_grant_as_they_come() -> None:
    ledger = Ledger()
    ledger.grant(100)
    for token in range(300):
        ledger.enter(1, 0.0, granted=int(token < 100))
    assert ledger.credit(0.02) == pytest.approx(6.0)


def test_a_grant_is_taken_back() -> None:
    ledger = Ledger()
    ledger.grant(100)
    ledger.enter(10, 0.0, granted=10)
    ledger.grant(-90)
    assert ledger.credit(0.1) == pytest.approx(1.0)


def test_old_gains_fade() -> None:
    ledger = Ledger(memory=100)
    ledger.enter(1, 50.0)
    for _ in range(100):
        ledger.enter(1, 0.0)
    assert ledger.credit(0.0) == pytest.approx(50 * math.exp(-1))
