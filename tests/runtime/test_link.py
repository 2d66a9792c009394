"""What is believed of a link after some swaps."""

from __future__ import annotations

import pytest

from vericache_core.runtime.link import LinkMeter


def test_nothing_is_believed_before_the_first_swap() -> None:
    meter = LinkMeter()
    meter.observe("host", 0, 0.0)
    meter.observe("disk", 10, 1.0)
    assert meter.seconds_per_byte("host") is None
    assert meter.seconds_per_byte("disk") == 0.1


def test_a_link_that_slows_down_is_believed_within_some_swaps() -> None:
    meter = LinkMeter()
    for _ in range(50):
        meter.observe("host", 100, 1.0)
    assert meter.seconds_per_byte("host") == pytest.approx(0.01)
    for _ in range(8):
        meter.observe("host", 100, 10.0)
    rate = meter.seconds_per_byte("host")
    assert rate is not None
    assert 0.09 < rate < 0.1
