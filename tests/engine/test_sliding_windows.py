"""Layers with a sliding window: drafts beyond it are taken back exactly, and old rows are given back."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from tests.drafters import AntiOracle, Scripted, drafting
from tests.models import VOCAB, engine, full_forward_decode, model, prompt
from tests.watch import assert_same, same_rows, watching
from vericache_core.cache.full import FullKV
from vericache_core.cache.pages import PAGE
from vericache_core.cache.ring import SwapRing
from vericache_core.runtime.sampling_params import SamplingParams

PARAMS = SamplingParams(max_new_tokens=40)


@pytest.mark.parametrize("length", [3, 7, 8, 9, 20])
@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_rejected_drafts_leave_no_row_behind(name: str, length: int) -> None:
    ours, ids = engine(name), prompt(length, seed=length)
    with watching(ours) as plain:
        (expected,) = ours.generate(ids, PARAMS, compressor=None, record_logits=True)
    references = {tuple(ids): expected.token_ids}
    for drafter in (AntiOracle(references, VOCAB), Scripted(references, VOCAB, (0, 1, 2, 3, 4))):
        with drafting(drafter), watching(ours) as drafted:
            (found,) = ours.generate(ids, PARAMS, record_logits=True)
        assert_same(found, expected)
        assert same_rows(drafted.in_order()[0], plain.in_order()[0])
    assert list(expected.token_ids) == full_forward_decode(model(name), ids, 40)[0]


@pytest.mark.parametrize("window", [PAGE - 1, PAGE, PAGE + 1])
def test_windows_beside_a_page_boundary(window: int) -> None:
    from tests.models import build, engine_over

    loaded = build("mistral", sliding_window=window)
    ours, ids = engine_over(loaded, window=5), prompt(2 * PAGE - 9)
    (expected,) = ours.generate(ids, PARAMS, compressor=None, record_logits=True)
    with drafting(Scripted({tuple(ids): expected.token_ids}, VOCAB, (0, 5, 1, 3))):
        (found,) = ours.generate(ids, PARAMS, record_logits=True)
    assert_same(found, expected)
    assert list(expected.token_ids[:6]) == full_forward_decode(loaded, ids, 6)[0]


@pytest.mark.parametrize("compressor", [None, "random"])
def test_memory_is_bounded_by_the_window(compressor: str | None) -> None:
    ours = engine("mistral", compressor="random", keep=0.5)
    with watching(ours) as watch:
        ours.generate(prompt(5 * PAGE), SamplingParams(max_new_tokens=PAGE + 40), compressor=compressor)
    page_bytes = sum(layer.token_bytes for layer in ours.adapter.layers) * PAGE
    # window - 1 rows before, the rows of a step after, each may touch one page more than it fills
    assert max(watch.resident) <= 3 * page_bytes


def test_a_rollback_that_would_need_released_rows_raises() -> None:
    window = 8
    first_full = dataclasses.replace(engine("mistral").adapter.layers[0], kind="full", sliding_window=None)
    layers = (first_full, *engine("mistral").adapter.layers[1:])  # a layer that could go back comes first
    full = FullKV(layers, torch.device("cpu"), "device", (), SwapRing(2, torch.device("cpu")))
    for _ in range(3 * PAGE // 16):
        for layer in layers:
            pages = full.device_pages(layer.index)
            rows = torch.zeros(layer.kv_heads, 16, layer.head_dim)
            pages.write(np.full(layer.kv_heads, full.tokens, dtype=np.int64), rows, rows)
        full.advance(16)
    first = full.device_pages(1).first_row
    assert first == (3 * PAGE - window + 1) // PAGE * PAGE > 0
    full.rollback(full.tokens - first - window)
    full.check_integrity()
    before = full.tokens
    with pytest.raises(IndexError, match="roll back"):
        full.rollback(window)
    assert full.tokens == before
    full.check_integrity()
