from __future__ import annotations

from pathlib import Path

import pytest

from vericache_core.config import load_config
from vericache_core.errors import ConfigError
from vericache_core.runtime.admission import AdmissionPolicy, check_acceptable
from vericache_core.runtime.costs import CostModel
from vericache_core.runtime.modes import Demand, best_mix
from vericache_core.runtime.schedulable import Bytes
from vericache_core.sizes import exact_size, is_size, parse_size, size


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


@pytest.mark.parametrize(
    ("text", "count"),
    [("1GB", 10**9), ("1.5 gib", 3 * 2**29), ("512MiB", 2**29), ("0.0001kB", 1), ("7b", 7), ("3T", 3 * 10**12)],
)
def test_sizes_are_read_in_thousands_or_1024s(text: str, count: int) -> None:
    assert is_size(text)
    assert parse_size(text, "bytes") == count


@pytest.mark.parametrize("text", ["", "1", "1.5", "1e9", "GB", "-1GB", "1XB", "1 G B", "none"])
def test_what_has_no_unit_is_no_size(text: str) -> None:
    assert not is_size(text)


def test_nothing_is_no_size_to_ask_for() -> None:
    with pytest.raises(ConfigError, match=r"^bytes=0GB: expected a size such as 10GB"):
        parse_size("0GB", "bytes")


def test_settings_in_bytes_take_sizes(tmp_path: Path) -> None:
    assert load_config(env={"VERICACHE_DEVICE_BUDGET": "1.5GiB"}).device_budget == 3 * 2**29
    assert load_config(env={}, overrides={"host_budget": "2GB", "link_bytes_per_s": "100MB"}).link_bytes_per_s == 1e8
    (tmp_path / "c.toml").write_text('disk_budget = "3kB"\n')
    assert load_config(tmp_path / "c.toml", env={}).disk_budget == 3000
    with pytest.raises(ConfigError, match="integer >= 1, or a size such as 10GB, got '1XB'"):
        load_config(env={"VERICACHE_DEVICE_BUDGET": "1XB"})
    with pytest.raises(ConfigError, match="rows: expected"):
        load_config(env={}, overrides={"rows": "1kB"})
