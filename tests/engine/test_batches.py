"""Requests in one step: ragged acceptance, rows that leave at different times, more requests than rows, no mixing."""

from __future__ import annotations

import functools
import threading

import pytest

from tests.drafters import Scripted, drafting
from tests.models import VOCAB, engine, prompt
from tests.watch import assert_same, same_rows, watching
from vericache_core.outputs import RequestOutput
from vericache_core.runtime.sampling_params import SamplingParams

LENGTHS = (5, 33, 1, 150, 18)
PROMPTS = [prompt(length, seed=length) for length in LENGTHS]
LIMITS = [30, 7, 22, 2, 13]


@functools.cache
def alone(name: str, compressor: str | None, limits: tuple[int, ...] = tuple(LIMITS)) -> list[RequestOutput]:
    ours = engine(name)
    each = zip(PROMPTS, limits, strict=True)
    return [
        ours.generate(ids, SamplingParams(max_new_tokens=limit), compressor=compressor, record_logits=True)[0]
        for ids, limit in each
    ]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
@pytest.mark.parametrize("window", [4, 11])
@pytest.mark.parametrize("tier", ["device", "host"])
def test_each_row_of_a_ragged_batch_is_its_own_run(name: str, window: int, tier: str) -> None:
    references = {tuple(ids): out.token_ids for ids, out in zip(PROMPTS, alone(name, None), strict=True)}
    ours = engine(name, window=window, full_kv=tier)
    params = [SamplingParams(max_new_tokens=limit) for limit in LIMITS]
    with drafting(Scripted(references, VOCAB, (0, 1, 3, window, 2))), watching(ours) as watch:
        found = ours.generate(PROMPTS, params, record_logits=True)
    for mine, theirs in zip(found, alone(name, None), strict=True):
        assert_same(mine, theirs)
    with watching(ours) as single:
        for ids, own in zip(PROMPTS, params, strict=True):
            ours.generate(ids, own, compressor=None)
    assert all(same_rows(a, b) for a, b in zip(watch.in_order(), single.in_order(), strict=True))


@pytest.mark.parametrize("limits", [(2, 30, 30, 30, 30), (30, 30, 30, 1, 30), (9, 8, 7, 6, 5)])
def test_rows_leave_in_any_order(limits: tuple[int, ...]) -> None:
    """The longest first (its prompt is the fourth), the first first, the last first."""
    params = [SamplingParams(max_new_tokens=limit) for limit in limits]
    found = engine("llama", compressor="random", keep=0.4).generate(PROMPTS, params, record_logits=True)
    for mine, theirs in zip(found, alone("llama", None, limits), strict=True):
        assert_same(mine, theirs)


@pytest.mark.parametrize("tier", ["device", "disk"])
def test_more_requests_than_rows(tier: str) -> None:
    ours = engine("llama", rows=4, window=3, compressor="random", keep=0.5, full_kv=tier)
    prompts = [prompt(1 + 3 * number, seed=number) for number in range(11)]
    params = SamplingParams(max_new_tokens=9)
    together = ours.generate(prompts, params, record_logits=True)
    for ids, mine in zip(prompts, together, strict=True):
        assert_same(mine, ours.generate(ids, params, compressor=None, record_logits=True)[0])


def test_plain_and_drafting_requests_share_steps() -> None:
    """A one-token request drafts nothing; it runs beside those that do."""
    params = [SamplingParams(max_new_tokens=limit) for limit in (1, 20, 0, 20, 1)]
    found = engine("llama", compressor="random", keep=0.5).generate(PROMPTS, params)
    expected = alone("llama", None, (20, 20, 20, 20, 20))
    for mine, theirs, own in zip(found, expected, params, strict=True):
        assert mine.token_ids == theirs.token_ids[: own.max_new_tokens]
        assert mine.finish_reason == "length"


def test_requests_with_disjoint_tokens_stay_apart_under_concurrency() -> None:
    """Each thread's prompts use token ids of its own; nothing of one may change another's output."""
    ours = engine("gpt2", compressor="random", keep=0.3, full_kv="host", window=3)
    params = SamplingParams(max_new_tokens=8)

    def tenant(number: int, round_: int) -> list[int]:
        return [number * 60 + token % 60 for token in prompt(20 + 5 * number + round_, seed=100 * number + round_)]

    expected = {
        (number, round_): ours.generate(tenant(number, round_), params, compressor=None)[0].token_ids
        for number in range(4)
        for round_ in range(4)
    }
    wrong: list[object] = []

    def work(number: int) -> None:
        try:
            for round_ in range(4):
                own = tenant(number, round_)
                if round_ % 2:
                    got = tuple(token for chunk in ours.stream(own, params) for token in chunk.token_ids)
                else:
                    got = ours.generate(own, params)[0].token_ids
                if got != expected[number, round_]:
                    wrong.append((number, round_))
        except Exception as error:  # noqa: BLE001 (a thread's exception would be lost)
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not ours.loop.requests
