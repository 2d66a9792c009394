from __future__ import annotations

import math

import pytest

from vericache_core.runtime.ledger import Ledger


def test_credit_is_the_tolerated_share_and_what_was_gained() -> None:
    ledger = Ledger()
    ledger.open(100)
    assert ledger.credit(0.02) == 2.0
    ledger.enter(3, -1.5)
    assert ledger.credit(0.02) == 0.5
    ledger.enter(10, 4.0)
    assert ledger.credit(0.02) == 4.5
    assert ledger.gained == 2.5


def test_tokens_beyond_the_grant_count() -> None:
    ledger = Ledger()
    ledger.open(100)
    for _ in range(300):
        ledger.enter(1, 0.0)
    assert ledger.credit(0.02) == pytest.approx(6.0)


def test_old_gains_fade() -> None:
    ledger = Ledger(memory=100)
    ledger.enter(1, 50.0)
    for _ in range(100):
        ledger.enter(1, 0.0)
    assert ledger.gained == pytest.approx(50 * math.exp(-1))
    assert ledger.credit(0.0) == ledger.gained
