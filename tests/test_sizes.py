from __future__ import annotations

import pytest

from vericache_core.errors import ConfigError
from vericache_core.runtime.admission import AdmissionPolicy, check_acceptable
from vericache_core.runtime.costs import CostModel
from vericache_core.runtime.modes import Demand, best_mix
from vericache_core.runtime.schedulable import Bytes
from vericache_core.sizes import exact_size, size


@pytest.mark.parametrize(
    ("count", "short", "exact"),
    [
        (0, "0 B", "0 bytes"),
        (1, "1 B", "1 byte"),
        (999, "999 B", "999 bytes"),
        (999.6, "1.0 kB", "1.0 kB (1,000 bytes)"),
        (11_770_000, "11.8 MB", "11.8 MB (11,770,000 bytes)"),
        (1.177e7, "11.8 MB", "11.8 MB (11,770,000 bytes)"),
        (999_900, "999.9 kB", "999.9 kB (999,900 bytes)"),
        (999_990, "1.0 MB", "1.0 MB (999,990 bytes)"),  # and not 1000.0 kB
        (64e9, "64.0 GB", "64.0 GB (64,000,000,000 bytes)"),
        (2.5e21, "2500.0 EB", "2500.0 EB (2,500,000,000,000,000,000,000 bytes)"),
    ],
)
def test_bytes_for_people(count: float, short: str, exact: str) -> None:
    assert (size(count), exact_size(count)) == (short, exact)


class _Big:
    number, arrival, priority, transient = 0, 0.0, 0, 0.0
    holds = Bytes(11_770_000.0, 0.0, 0.0)


def test_errors_about_budgets_can_be_compared_with_settings() -> None:
    with pytest.raises(ConfigError) as refused:
        check_acceptable(_Big(), 0, Bytes(1000.0, 0.0, 0.0), AdmissionPolicy())  # type: ignore[arg-type]
    assert refused.value.cause == "it needs 11.8 MB (11,770,000 bytes) of 1.0 kB (1,000 bytes)"
    with pytest.raises(ConfigError) as refused:
        best_mix(CostModel({8: 0.1}, 1e-10, 1e-8, {}, 30), Demand(10, 11_770_000, 5e6, 0, 1e6), 1, 5e6)
    assert refused.value.message == "a device budget of 5.0 MB (5,000,000 bytes) is too small for one request"
    assert refused.value.cause == "a request of 10 tokens needs 6.0 MB (6,000,000 bytes)"
