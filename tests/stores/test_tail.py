"""What a prefix has behind its last whole chunk: saved and loaded with it, so that nothing is left to compute."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stores.support import CHUNK, MODELS, Model, changed, make_store, tokens
from vericache_core.cache.full import FullKV
from vericache_core.stores.prefix import PrefixStore


def save_whole(model: Model, store: PrefixStore, ids: list[int], tier: str = "device") -> FullKV:
    """Prefill ``ids`` and save all of them; windows must not have moved on when the tail is captured."""
    full = model.cache(tier)
    model.prefill(full, ids[:-1], store)
    if len(ids) % CHUNK:
        model.prefill(full, ids, None)
        tail = store.capture_tail(ids, full)
        assert tail is not None
        store.put(tail)
    else:
        model.prefill(full, ids, store)
        assert store.capture_tail(ids, full) is None
    return full


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("length", [3, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 60, 3 * CHUNK - 1, 3 * CHUNK])
def test_a_whole_prefix_comes_back(kind: str, tier: str, length: int, tmp_path: Path) -> None:
    model, ids = Model(MODELS[kind]), tokens(length)
    store = make_store(model, tmp_path)
    save_whole(model, store, ids)
    again = model.cache(tier)
    loaded = make_store(model, tmp_path).load(ids, again, whole=True)
    assert (loaded.tokens, loaded.faults) == (length, ())
    assert model.wrong_rows(again, ids) == 0
    model.prefill(again, [*ids, *tokens(40, seed=9)])  # and one can go on from it
    assert model.wrong_rows(again, [*ids, *tokens(40, seed=9)]) == 0
    again.close()


def test_a_tail_belongs_to_its_prefix_alone(tmp_path: Path) -> None:
    model, ids = Model(MODELS["full"]), tokens(CHUNK + 50)
    store = make_store(model, tmp_path)
    save_whole(model, store, ids)
    others = {
        "longer": ([*ids, 7], CHUNK),
        "shorter": (ids[:-1], CHUNK),
        "another end": ([*ids[:-1], (ids[-1] + 1) % 512], CHUNK),
        "another beginning": ([(ids[0] + 1) % 512, *ids[1:]], 0),
    }
    for name, (other, expected) in others.items():
        full = model.cache()
        assert store.load(other, full, whole=True).tokens == expected, name
        assert model.wrong_rows(full, other) == 0
    assert make_store(model, tmp_path, changed("tenant")).load(ids, model.cache(), whole=True).tokens == 0
    assert store.load(ids, model.cache()).tokens == CHUNK  # who did not ask for all gets chunks
    assert store.load(ids, model.cache(), most=len(ids) - 1, whole=True).tokens == CHUNK


@pytest.mark.fault("stale", "the end of a prefix gone or flipped")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("how", ["gone", "flipped"])
def test_without_its_tail_a_prefix_ends_at_a_chunk(kind: str, how: str, tmp_path: Path) -> None:
    model, ids = Model(MODELS[kind]), tokens(2 * CHUNK + 50)
    store = make_store(model, tmp_path)
    full = save_whole(model, store, ids)
    tail = store.capture_tail(ids, full)
    assert tail is not None
    file = tmp_path / "blobs" / tail.key
    data = bytearray(file.read_bytes())
    file.unlink()
    if how == "flipped":
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    again = model.cache()
    loaded = store.load(ids, again, whole=True)
    assert (loaded.tokens, len(loaded.faults)) == (2 * CHUNK, 1 if how == "flipped" else 0)
    assert model.wrong_rows(again, ids) == 0
    assert not file.exists()


def test_what_lies_behind_a_tail_is_not_saved(tmp_path: Path) -> None:
    """Rows of drafts may lie in its last page; they are no part of the prefix."""
    model, ids = Model(MODELS["full"]), tokens(50)
    full = model.cache()
    model.prefill(full, tokens(120, seed=4))
    full.rollback(120)
    model.prefill(full, ids)
    first = make_store(model, tmp_path).capture_tail(ids, full)
    clean = model.cache()
    model.prefill(clean, ids)
    for layer in model.layers:
        for page in clean.device_pages(layer.index).page(0):
            (page[:, :, 50:] if page.shape[-1] == CHUNK else page[:, 50:]).zero_()
    second = make_store(model, tmp_path).capture_tail(ids, clean)
    assert first is not None
    assert second is not None
    assert [bytes(part) for part in first.parts] == [bytes(part) for part in second.parts]
