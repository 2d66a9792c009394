"""Full KV on other tiers: bit-exact, small on the device, only missing rows moved, faults recovered from or named."""

from __future__ import annotations

import gc
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.drafters import AntiOracle, Oracle, drafting
from tests.engine.faulty import Faulty, failing_disk, spec
from tests.models import VOCAB, build, engine, engine_over, model, prompt
from tests.watch import assert_same, watching
from vericache_core.cache.pages import PAGE, Extent
from vericache_core.errors import SwapError
from vericache_core.runtime.sampling_params import SamplingParams

PROMPT = prompt(PAGE + 9, seed=2)
PENALTIES = SamplingParams(
    max_new_tokens=18, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5, no_repeat_ngram=3, logprobs=1
)


def test_an_unwritable_swap_folder_is_an_error_before_anything_runs(tmp_path: Path) -> None:
    ours = engine(full_kv="disk", swap_dir=str(tmp_path / "missing"))
    with pytest.raises(SwapError, match="swap_dir"):
        ours.generate(PROMPT)
    assert ours.loop.steps == 0
    assert not ours.loop.requests
    (out,) = ours.generate(PROMPT, SamplingParams(max_new_tokens=2), compressor=None)  # plain decoding swaps nothing
    assert len(out.token_ids) == 2


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_no_file_is_ever_left(tmp_path: Path, policy: str) -> None:
    ours = engine(full_kv="disk", swap_dir=str(tmp_path), on_swap_error=policy)
    step, seen = ours.loop.step, []

    def looking() -> Any:
        seen.append(list(tmp_path.iterdir()))
        return step()

    ours.loop.step = looking  # type: ignore[method-assign]
    with failing_disk("EIO", {25}):
        ours.generate([PROMPT, PROMPT[:30]], PENALTIES)
    assert seen
    assert not any(seen)
    assert not list(tmp_path.iterdir())


def moved_until_drafting() -> int:
    """Prefill moves, for each block of the prompt, the rows before it; compressing reads the prefix as often as it likes."""
    (out,) = engine(full_kv="host").generate(PROMPT, SamplingParams(max_new_tokens=2))
    rows = sum(range(0, len(PROMPT), 16))
    assert out.metrics.swap_bytes >= rows * sum(layer.token_bytes for layer in engine().adapter.layers)
    return out.metrics.swap_bytes


@pytest.mark.parametrize("accept", [Oracle, AntiOracle])
def test_host_moves_the_dropped_rows_and_nothing_else(accept: Any) -> None:
    """Each verify needs what token dropping dropped; survivors and tail are on the device already."""
    ours = engine(full_kv="host", compressor="random", keep=0.25, window=4)
    (plain,) = ours.generate(PROMPT, SamplingParams(max_new_tokens=21), compressor=None)
    with drafting(accept({tuple(PROMPT): plain.token_ids}, VOCAB)):
        (out,) = ours.generate(PROMPT, SamplingParams(max_new_tokens=21))
    per_token = sum(layer.token_bytes for layer in ours.adapter.layers)
    dropped = len(PROMPT) - len(PROMPT) // 4
    decode = out.metrics.rounds + (0 if accept is Oracle else 1)  # the last token alone is no round
    assert out.metrics.swap_bytes == moved_until_drafting() + decode * dropped * per_token


def test_the_identity_compressor_moves_nothing_after_prefill() -> None:
    ours = engine(full_kv="host")
    (out,) = ours.generate(PROMPT, SamplingParams(max_new_tokens=21))
    assert out.metrics.rounds
    assert out.metrics.swap_bytes == moved_until_drafting()


def live_kv(kv_heads: int, width: int) -> list[Tensor]:
    """Live tensors that could hold KV pages or rows of this model, by their shape; each storage once."""
    found = {}
    for candidate in gc.get_objects():
        shape = candidate.shape if type(candidate) is torch.Tensor and candidate.numel() else ()
        if len(shape) >= 3 and kv_heads in shape[:2] and width in shape and PAGE in shape:
            found[candidate.untyped_storage().data_ptr()] = candidate
    return list(found.values())


def test_the_full_cache_never_stands_on_the_device_with_the_disk_tier(request: pytest.FixtureRequest) -> None:
    loaded = build("llama", num_hidden_layers=12)
    ours = engine_over(loaded, full_kv="disk", compressor="random", keep=0.25, window=4, ring_layers=2)
    ids = prompt(7 * PAGE + 5)
    gc.collect()
    gc.freeze()  # what is alive now is of no interest and slow to look through
    request.addfinalizer(gc.unfreeze)
    layers, before = ours.adapter.layers, len(live_kv(2, 16))
    assert before == 0
    full = sum(layer.token_bytes for layer in layers) * len(ids)
    step, peak, largest = ours.loop.step, [0], [0]

    def measuring() -> Any:
        done = step()
        held = live_kv(2, 16)
        peak[0] = max(peak[0], sum(t.untyped_storage().nbytes() for t in held))
        largest[0] = max(largest[0], max((t.untyped_storage().nbytes() for t in held), default=0))
        return done

    ours.loop.step = measuring  # type: ignore[method-assign]
    (out,) = ours.generate(ids, SamplingParams(max_new_tokens=12))
    tail, one_layer = 12, layers[0].token_bytes
    pages_of_draft = -(-(len(ids) // 4 + tail) // PAGE) * PAGE
    slot = (8 + 8 // 8 + 1) * PAGE * one_layer
    bound = pages_of_draft * one_layer * len(layers) + ours.config.ring_layers * slot
    slack = len(layers) * PAGE * one_layer  # one page a layer: pages are whole
    assert out.metrics.peak_device_kv_bytes <= bound + slack
    assert peak[0] <= bound + slack
    assert peak[0] <= out.metrics.peak_device_kv_bytes * 1.01 + 4096
    assert out.metrics.peak_device_kv_bytes < 0.75 * full
    assert largest[0] <= slot
    del ours.loop.step
    del out
    ours.close()
    gc.collect()
    assert not live_kv(2, 16)


KINDS = ["ENOSPC", "EDQUOT", "short write", "EIO", "short read"]


def count_calls(kind: str, params: SamplingParams) -> int:
    with failing_disk(kind, set()) as made:
        engine(full_kv="disk", compressor="random", keep=0.5).generate(PROMPT, params)
    return len(made)


@pytest.mark.parametrize("kind", KINDS)
def test_recovery_gives_the_right_tokens_at_every_stage(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Prefill, first rounds, last rounds: penalty counts, log probabilities and finish are those of a run without fault."""
    plain = engine(full_kv="disk", compressor="random", keep=0.5)
    (expected,) = plain.generate(PROMPT, PENALTIES, compressor=None, record_logits=True)
    total = count_calls(kind, PENALTIES)
    assert total > 60
    stages = sorted({0, 1, 2, *range(3, total, max(1, total // 9)), total - 1})
    for at in stages:
        ours = engine(full_kv="disk", compressor="random", keep=0.5)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "vericache"), failing_disk(kind, {at}), watching(ours):
            (found,) = ours.generate(PROMPT, PENALTIES, record_logits=True)
        assert_same(found, expected)
        assert len(found.metrics.degraded) == 1, at
        assert "recomput" in found.metrics.degraded[0]
        assert "recomputing" in caplog.text


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("needy", [False, True])
def test_recovery_at_every_round(tier: str, needy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The swap of round r fails, with a draft pending; also for a compressor that wants everything observed."""
    from vericache_core.cache.full import FullKV

    factory = lambda options: Faulty(options, "", {})  # noqa: E731
    specs = [spec("needy", factory)]
    name = "needy" if needy else "random"
    expected = engine_over(model("gpt2")).generate(PROMPT, PENALTIES, compressor=None, record_logits=True)[0]
    original = FullKV.pages
    for at in range(10):
        rounds: set[int] = set()

        def pages(self: FullKV, layer: int, at: int = at, rounds: set[int] = rounds) -> Any:
            if self.tokens >= len(PROMPT):
                rounds.add(self.tokens)
                if len(rounds) == at + 1 and layer == 1:
                    rounds.add(-1)  # once
                    raise SwapError("planted")
            return original(self, layer)

        monkeypatch.setattr(FullKV, "pages", pages)
        ours = engine_over(model("gpt2"), specs=specs, full_kv=tier, compressor=name, **({} if needy else {"keep": 0.3}))
        with watching(ours):
            (found,) = ours.generate(PROMPT, PENALTIES, record_logits=True)
        assert_same(found, expected)
        fired = -1 in rounds
        assert len(found.metrics.degraded) == fired
        if needy and fired:
            assert found.metrics.acceptance == 1.0  # the draft KV made after the recovery is a whole one


def test_twice_in_one_run_and_during_recovery() -> None:
    ours = engine(full_kv="disk", compressor="random", keep=0.5)
    (expected,) = ours.generate(PROMPT, PENALTIES, compressor=None, record_logits=True)
    with failing_disk("EIO", {3, 12, 60}):
        (found,) = ours.generate(PROMPT, PENALTIES, record_logits=True)
    assert_same(found, expected)
    assert len(found.metrics.degraded) == 3, found.metrics.degraded


def test_a_disk_that_stays_broken_fails_the_request_and_no_other() -> None:
    ours = engine(full_kv="disk", compressor="random", keep=0.5)
    plain_stream = ours.stream(PROMPT, PENALTIES, compressor=None)
    head = next(plain_stream).token_ids
    with failing_disk("ENOSPC", set(range(10**6))):
        (found,) = ours.generate(PROMPT, PENALTIES)
    assert isinstance(found.error, SwapError)
    assert "No space left" in str(found.error)
    assert found.token_ids == ()
    rest = tuple(token for chunk in plain_stream for token in chunk.token_ids)
    assert head + rest == ours.generate(PROMPT, PENALTIES, compressor=None)[0].token_ids
    (again,) = ours.generate(PROMPT, PENALTIES)  # space is back
    assert again.token_ids == head + rest


@pytest.mark.parametrize("kind", KINDS)
def test_with_policy_fail_the_error_is_typed_and_the_tokens_before_it_are_right(kind: str) -> None:
    ours = engine(full_kv="disk", compressor="random", keep=0.5, on_swap_error="fail")
    (expected,) = ours.generate(PROMPT, PENALTIES, compressor=None)
    total = count_calls(kind, PENALTIES)
    with failing_disk(kind, {total * 2 - 60}):
        both = ours.generate([PROMPT, PROMPT], PENALTIES)
    failed = [out for out in both if out.error is not None]
    assert len(failed) == 1
    assert isinstance(failed[0].error, SwapError)
    assert failed[0].finish_reason == "error"
    for out in both:
        assert out.token_ids == expected.token_ids[: len(out.token_ids)]
    assert not ours.loop.requests
    ours.loop.ring.check_integrity()


@pytest.mark.parametrize("at", range(1, 9))
def test_memory_that_cannot_be_had_for_a_swap_costs_a_recompute(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ring slots and host pages, during prefill and later."""
    ours = engine(full_kv="host", compressor="random", keep=0.5)
    (expected,) = ours.generate(PROMPT, PENALTIES, compressor=None)
    allocate, calls = Extent.allocate, []

    def failing(layer: Any, pages: int, device: Any, *, pinned: bool = False) -> Any:
        calls.append(pages)
        if len(calls) == at:
            raise MemoryError("planted")
        return allocate(layer, pages, device, pinned=pinned)

    monkeypatch.setattr(Extent, "allocate", failing)
    (found,) = ours.generate(PROMPT, PENALTIES)
    assert found.token_ids == expected.token_ids
    assert len(calls) > at
    assert len(found.metrics.degraded) == 1


def test_a_file_pulled_away_is_noticed() -> None:
    """The descriptor is closed behind our back: an error by name, then a recompute."""
    ours = engine(full_kv="disk", compressor="random", keep=0.5)
    (expected,) = ours.generate(PROMPT, PENALTIES, compressor=None)
    stream = ours.stream(PROMPT, PENALTIES)
    got = list(next(stream).token_ids)
    store: Any = ours.loop.requests[0].full._store
    os.ftruncate(store._file, 0)
    got += [token for chunk in stream for token in chunk.token_ids]
    assert tuple(got) == expected.token_ids
