from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from vericache_core.errors import ConfigError
from vericache_core.runtime.trace import Arrival, poisson, read_trace

GOOD = '{"at": 1, "prompt_tokens": 5, "new_tokens": 2}'


def test_a_trace_is_read_in_order(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(f'{GOOD}\n\n{{"at": 1.5, "prompt_tokens": 9, "new_tokens": 1, "priority": -2, "hazard": 0.5}}\n')
    assert read_trace(file) == [Arrival(1.0, 5, 2), Arrival(1.5, 9, 1, -2, 0.5)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "expected an object"),
        ('{"at": 1, "prompt_tokens": 5}', "new_tokens is missing"),
        ('{"at": 1, "prompt_token": 5, "new_tokens": 2}', "did you mean 'prompt_tokens'"),
        ('{"at": -1, "prompt_tokens": 5, "new_tokens": 2}', "at: expected seconds"),
        ('{"at": NaN, "prompt_tokens": 5, "new_tokens": 2}', "at: expected seconds"),
        ('{"at": Infinity, "prompt_tokens": 5, "new_tokens": 2}', "at: expected seconds"),
        ('{"at": true, "prompt_tokens": 5, "new_tokens": 2}', "at: expected seconds"),
        ('{"at": "1", "prompt_tokens": 5, "new_tokens": 2}', "at: expected seconds"),
        ('{"at": 0.5, "prompt_tokens": 5, "new_tokens": 2}', "arrives before the line above"),
        ('{"at": 2, "prompt_tokens": 0, "new_tokens": 2}', "prompt_tokens: expected a whole number, 1 or more"),
        ('{"at": 2, "prompt_tokens": 5.5, "new_tokens": 2}', "prompt_tokens: expected a whole"),
        ('{"at": 2, "prompt_tokens": 5, "new_tokens": true}', "new_tokens: expected a whole"),
        ('{"at": 2, "prompt_tokens": 5, "new_tokens": 2, "priority": "high"}', "priority: expected a whole"),
        ('{"at": 2, "prompt_tokens": 5, "new_tokens": 2, "hazard": 1.5}', "hazard: expected a number from 0 to 1"),
    ],
)
def test_an_impossible_arrival_is_named_by_its_line(tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(f"{GOOD}\n{line}\n")
    with pytest.raises(ConfigError, match=r"trace\.jsonl:2: ") as caught:
        read_trace(file)
    assert reason in caught.value.message


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name, reason in (("empty", "no arrivals"), ("bytes", "UTF-8"), ("none", "cannot be read")):
        with pytest.raises(ConfigError, match=reason):
            read_trace(tmp_path / name)


def test_poisson_arrivals_have_their_rate_and_repeat_with_their_seed() -> None:
    made = poisson(4.0, 4000, (10, 20), 7, [0.1, 0.2], seed=1)
    assert made[-1].at == pytest.approx(1000, rel=0.05)
    gaps = [after.at - before.at for before, after in itertools.pairwise(made)]
    assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)
    assert {arrival.prompt_tokens for arrival in made} == set(range(10, 21))
    assert [arrival.hazard for arrival in made[:3]] == [0.1, 0.2, 0.1]
    assert made == poisson(4.0, 4000, (10, 20), 7, [0.1, 0.2], seed=1)
    assert made != poisson(4.0, 4000, (10, 20), 7, [0.1, 0.2], seed=2)
    assert {arrival.at for arrival in poisson(0, 5, (1, 1), 1, [], seed=1)} == {0.0}


def test_impossible_rates_and_lengths_are_refused() -> None:
    for rate, count, low, high, new in ((-1, 1, 1, 1, 1), (1, 0, 1, 1, 1), (1, 1, 0, 1, 1), (1, 1, 3, 2, 1), (1, 1, 1, 1, 0)):
        with pytest.raises(ConfigError, match="impossible arrivals"):
            poisson(rate, count, (low, high), new, [], seed=1)
