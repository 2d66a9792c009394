"""Full KV on every tier keeps every bit; the ring hands no slot out twice and leaves no thread behind."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.cache.test_pages import DTYPES, bit_noise
from tests.engine.faulty import failing_disk
from tests.models import engine, prompt
from tests.sdk.making import descriptor
from tests.watch import same_bits
from vericache_core.cache.full import FullKV
from vericache_core.cache.pages import PAGE
from vericache_core.cache.ring import RingPeak, SwapRing
from vericache_core.errors import SwapError
from vericache_core.kv import LayerDescriptor
from vericache_core.runtime.sampling_params import SamplingParams

CPU = torch.device("cpu")


def append(full: FullKV, rows: Sequence[tuple[Tensor, Tensor]], keep: int) -> None:
    """One step: write a block of rows into every layer, then keep the first ``keep`` of them."""
    count = rows[0][0].shape[1]
    full.open(count)
    for layer, (keys, values) in zip(full.layers, rows, strict=True):
        full.pages(layer.index).write(np.full(layer.kv_heads, full.tokens, dtype=np.int64), keys, values)
        full.wrote(layer.index, count)
    full.close_step()
    full.advance(keep)


def layers_of(dtype: torch.dtype) -> list[LayerDescriptor]:
    """Layers that differ in heads and widths, one of them pinned."""
    return [
        descriptor(0, kv_heads=2, head_dim=4, value_dim=6, dtype=dtype),
        descriptor(1, kv_heads=1, head_dim=8, dtype=dtype),
        descriptor(2, kv_heads=2, head_dim=4, value_dim=6, dtype=dtype),
        descriptor(3, kv_heads=4, head_dim=4, value_dim=2, dtype=dtype),
    ]


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@given(
    steps=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 90), st.integers(0, 60)), min_size=1, max_size=7),
    dtype=st.sampled_from(DTYPES),
)
def test_every_bit_comes_back_after_rejections_and_rollbacks(
    tier: str, steps: list[tuple[int, int, int]], dtype: torch.dtype
) -> None:
    """NaN payloads, infinities, -0.0 and subnormals included; each step keeps some rows, then some are rolled back."""
    layers, ring = layers_of(dtype), SwapRing(2, CPU)
    full = FullKV(layers, CPU, tier, (2,), ring)
    model = [
        (bit_noise((one.kv_heads, 0, one.head_dim), dtype, 0), bit_noise((one.kv_heads, 0, one.value_dim), dtype, 0))
        for one in layers
    ]
    try:
        for number, (count, keep, wanted) in enumerate(steps):
            block = [
                (
                    bit_noise((layer.kv_heads, count, layer.head_dim), dtype, 100 * number + layer.index),
                    bit_noise((layer.kv_heads, count, layer.value_dim), dtype, 100 * number + layer.index + 50),
                )
                for layer in layers
            ]
            kept = min(keep, count)
            append(full, block, kept)
            model = [
                (torch.cat([k, new_k[:, :kept]], 1), torch.cat([v, new_v[:, :kept]], 1))
                for (k, v), (new_k, new_v) in zip(model, block, strict=True)
            ]
            back = min(wanted, full.tokens)
            full.rollback(back)
            model = [(k[:, : k.shape[1] - back], v[:, : v.shape[1] - back]) for k, v in model]
            full.check_integrity()
            ring.check_integrity()
            for layer, (keys, values) in zip(layers, model, strict=True):
                found = full.read(layer.index, 0, full.tokens)
                assert same_bits(found[0], keys)
                assert same_bits(found[1], values)
    finally:
        full.close()
        ring.close()
    full.close()
    assert ring.nbytes == 0


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_bad_ranges_raise(tier: str) -> None:
    full = FullKV([descriptor()], CPU, tier, (), SwapRing(2, CPU))
    append(full, [(torch.zeros(2, 5, 16), torch.zeros(2, 5, 16))], 5)
    for start, stop in ((0, 6), (-1, 2), (3, 2)):
        with pytest.raises(IndexError):
            full.read(0, start, stop)
    for rows in (-1, 6):
        with pytest.raises(IndexError):
            full.rollback(rows)
    full.rollback(0)
    assert full.tokens == 5
    full.close()


@pytest.mark.parametrize("kind", ["EIO", "short read"])
def test_a_failed_read_is_never_half_a_row(kind: str) -> None:
    full = FullKV([descriptor()], CPU, "disk", (), SwapRing(2, CPU))
    append(full, [(torch.ones(2, 5, 16), torch.ones(2, 5, 16))], 5)
    for call in (0, 1):  # keys, values
        with failing_disk(kind, {call}), pytest.raises(SwapError):
            full.read(0, 0, 5)
    assert full.read(0, 0, 5)[0].eq(1).all()
    full.close()
    with pytest.raises(SwapError, match="closed"):
        full.read(0, 0, 5)


def test_the_swap_file_has_no_name_and_its_descriptor_is_given_back(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").exists() else 0
    full = FullKV([descriptor()], CPU, "disk", (), SwapRing(2, CPU), str(tmp_path))
    assert not list(tmp_path.iterdir())
    full.close()
    if before:
        assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_slots_are_never_shared_and_too_small_ones_are_dropped() -> None:
    ring, layer, other = SwapRing(2, CPU), descriptor(), descriptor(1, head_dim=8)
    small, large = ring.acquire(layer, 10, None), ring.acquire(layer, 5 * PAGE, None)
    odd = ring.acquire(other, 10, None)
    ring.check_integrity()
    for slot in (small, large, odd):
        ring.release(slot)
    ring.check_integrity()
    again = ring.acquire(layer, 10, None)
    assert again.page(0)[0].data_ptr() == small.page(0)[0].data_ptr()  # the smallest that fits
    assert ring.acquire(other, 3, None).page(0)[0].data_ptr() == odd.page(0)[0].data_ptr()
    huge = ring.acquire(layer, 20 * PAGE, None)
    ring.check_integrity()
    with pytest.raises(KeyError):
        ring.release(small)  # was given back already
    ring.release(again)
    ring.release(huge)
    ring.trim()
    ring.check_integrity()
    ring.close()


def test_the_peak_counts_slots_in_use_and_kept_and_a_layer_of_each_cache_that_has_some() -> None:
    ring, layer = SwapRing(2, CPU), descriptor()
    page = PAGE * layer.token_bytes
    assert (ring.peak.nbytes, ring.peak.layers) == (0, None)
    one, other = object(), object()
    mine = [ring.acquire(layer, 3 * PAGE, one) for _ in range(2)]  # 3 pages, and one more to grow into
    assert (ring.peak.nbytes, ring.peak.layer_bytes) == (8 * page, 3 * page)
    theirs = [ring.acquire(layer, 8 * PAGE, other) for _ in range(2)]  # 8 pages, and two more
    assert (ring.peak.nbytes, ring.peak.layer_bytes) == (28 * page, 11 * page)
    assert ring.peak.nbytes == ring.nbytes
    assert ring.peak.layers == 28 / 11
    for slot in [*mine, *theirs]:
        ring.release(slot)
    kept = ring.acquire(layer, PAGE, one)  # as many bytes are held, and fewer are in use
    assert ring.peak.layers == 28 / 11
    ring.release(kept)
    ring.peak = RingPeak()
    ring.trim()
    ring.release(ring.acquire(layer, PAGE, one))
    assert (ring.peak.nbytes, ring.peak.layers) == (2 * page, 2.0)
    ring.close()


def test_closing_an_engine_ends_its_thread() -> None:
    before = set(threading.enumerate())  # a thread of another test may be on its way out

    def swapping() -> list[threading.Thread]:
        return [one for one in threading.enumerate() if one.name.startswith("vericache-swap") and one not in before]

    with engine("llama", full_kv="host") as ours:
        ours.generate(prompt(20), SamplingParams(max_new_tokens=3))
        assert len(swapping()) == 1
    assert not swapping()
    ours.generate(prompt(20), SamplingParams(max_new_tokens=3))  # it may be used again
    ours.close()
    assert not swapping()
