from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.stores.support import layers
from vericache_core.cache.full import FullKV
from vericache_core.cache.pages import PAGE, PagedRows
from vericache_core.cache.ring import SwapRing
from vericache_core.stores.chunks import stored_pages, usable, window_chunks

CPU = torch.device("cpu")


def naive_usable(window: int, tokens: int, chunk: int) -> bool:
    """Row by row: is every row that the next token sees, and the one it is written after, in a page that is stored?"""
    stored = set()
    for number in range(-(-tokens // chunk)):
        stop = (number + 1) * chunk
        for row in range(number * chunk, stop):
            if row >= stop - window:
                stored.add(row // PAGE)
    return all(row // PAGE in stored for row in range(max(0, min(tokens - window + 1, tokens - 1)), tokens))


@pytest.mark.parametrize("chunk", [128, 256, 384])
def test_a_prefix_is_usable_where_every_row_in_the_window_is_stored(chunk: int) -> None:
    for window in (1, 2, 8, 127, 128, 129, 200, 256, 257, 500, 2000):
        both = layers(2, window)
        for tokens in [*range(1, 40), *range(chunk - 5, chunk + 6), *range(3 * chunk - 130, 3 * chunk + 3)]:
            expected = tokens if naive_usable(window, tokens, chunk) else tokens // chunk * chunk
            assert usable(both, tokens, chunk) == expected, (window, tokens)
        for multiple in (chunk, 2 * chunk, 5 * chunk):
            assert usable(both, multiple, chunk) == multiple
            assert usable(both, multiple - 1, chunk) == multiple - 1


def test_full_layers_are_stored_whole_and_usable_anywhere() -> None:
    (layer,) = layers(1)
    assert stored_pages(layer, 2, 256) == range(4, 6)
    assert usable([layer], 777, 256) == 777
    assert window_chunks([layer], 256) == 0


@pytest.mark.parametrize("window", [1, 8, 128, 129, 300, 512, 513, 1000])
def test_windows_reach_back_as_far_as_said(window: int) -> None:
    (layer, _) = layers(2, window)
    for tokens in range(256 * 6 - 1, 256 * 6 + 1):
        first = max(0, tokens - window + 1) // 256
        assert (tokens - 1) // 256 - first < window_chunks([layer], 256)


def test_pages_can_be_left_out_at_the_beginning() -> None:
    layer = replace(layers(1)[0], kind="sliding", sliding_window=8)
    pages = PagedRows(layer, CPU)
    pages.skip(2)
    pages.check_integrity()
    with pytest.raises(IndexError):
        pages.page(1)
    pages.reserve(3 * PAGE)
    pages.grow_lengths(3 * PAGE)
    pages.check_integrity()
    assert pages.page(2)[0].shape == (1, 2, PAGE)
    pages.release_before(3 * PAGE)
    pages.check_integrity()
    assert pages.nbytes == 0


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pages_survive_the_way_through_bytes(tier: str, dtype: torch.dtype) -> None:
    model = layers(2, dtype=dtype)
    caches = [FullKV(model, CPU, tier, {1}, SwapRing(2, CPU)) for _ in range(2)]
    data = torch.randint(0, 256, (4096,), generator=torch.Generator().manual_seed(1)).to(torch.uint8).numpy()
    for layer in model:
        keys, values = (2 * PAGE * layer.kv_heads * dim * dtype.itemsize for dim in (layer.head_dim, layer.value_dim))
        caches[0].restore_pages(layer.index, 0, memoryview(data.data)[:keys], memoryview(data.data)[:values])
    caches[0].adopt(2 * PAGE)
    for layer in model:
        copy = caches[0].copy_pages(layer.index, range(2))
        parts = [memoryview(part.view(torch.uint8).numpy().reshape(-1).data) for part in (copy.keys, copy.values)]
        assert all(bytes(part) == data[: part.nbytes].tobytes() for part in parts)
        caches[1].restore_pages(layer.index, 0, *parts)
    caches[1].adopt(2 * PAGE)
    for layer in model:
        for ours, theirs in zip(caches[0].read(layer.index, 0, 256), caches[1].read(layer.index, 0, 256), strict=True):
            assert torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))
    for cache in caches:
        cache.check_integrity()
        cache.close()
