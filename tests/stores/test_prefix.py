from __future__ import annotations

import gc
import logging
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.stores.support import CHUNK, IDENTITY, MODELS, Model, changed, layers, live_on, make_store, tokens
from vericache_core.compressor import Compressor
from vericache_core.context import CompressContext
from vericache_core.errors import PayloadError, StoreError, StoreTimeout
from vericache_core.kv import PrefixView
from vericache_core.plugins.registry import default_registry
from vericache_core.stores.compressed import LoadedCompressed
from vericache_core.stores.disk import DiskBlobs
from vericache_core.stores.identity import PrefixIdentity
from vericache_core.stores.prefix import PrefixStore


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("kind", MODELS)
def test_what_is_loaded_is_what_a_prefill_computes(kind: str, tier: str, tmp_path: Path) -> None:
    model, ids = Model(MODELS[kind]), tokens(7 * CHUNK + 30)
    store = make_store(model, tmp_path)
    first = model.cache(tier)
    model.prefill(first, ids, store)
    assert model.wrong_rows(first, ids) == 0
    first.close()
    assert store.counts.chunks_saved == 7
    for length in (127, 128, 129, 255, 256, 257, 500, 896, 897, 926):
        for most in sorted({length, length - 1, max(1, length - 20)}):
            full = model.cache(tier)
            loaded = store.load(ids[:length], full, most=most)
            floor = min(length, most) // CHUNK * CHUNK
            assert full.tokens == loaded.tokens <= min(most, length // CHUNK * CHUNK)
            assert loaded.tokens >= floor or kind.startswith("window")
            assert not loaded.faults
            assert model.wrong_rows(full, ids) == 0
            model.prefill(full, ids[:length])  # the rest is computed behind it
            assert full.tokens == length
            assert model.wrong_rows(full, ids) == 0
            full.close()


@pytest.mark.fault("whole", "every kind of layer")
@pytest.mark.parametrize("kind", MODELS)
def test_a_prompt_that_is_stored_whole_leaves_one_token_to_compute(kind: str, tmp_path: Path) -> None:
    model, ids = Model(MODELS[kind]), tokens(4 * CHUNK)
    store = make_store(model, tmp_path)
    model.prefill(model.cache(), ids, store)
    for chunks in (1, 2, 4):
        full = model.cache()
        length = chunks * CHUNK
        assert store.load(ids[:length], full, most=length - 1).tokens == length - 1
        assert model.wrong_rows(full, ids) == 0
        model.prefill(full, ids[:length])
        assert (full.tokens, model.wrong_rows(full, ids)) == (length, 0)


@pytest.mark.fault("short", "asks nobody")
def test_a_prompt_shorter_than_a_chunk_asks_nobody(tmp_path: Path) -> None:
    model = Model(layers(2))
    store = make_store(model, tmp_path / "store")
    loaded = store.load(tokens(CHUNK - 1), model.cache())
    assert (loaded.tokens, loaded.faults) == (0, ())
    assert "no full chunk" in loaded.reason
    assert not (tmp_path / "store").exists()


def test_the_longest_common_prefix_is_used(tmp_path: Path) -> None:
    model, ids = Model(layers(2)), tokens(5 * CHUNK)
    store = make_store(model, tmp_path)
    model.prefill(model.cache(), ids, store)
    for at in (0, 127, 128, 300, 511, 639):
        other = [*ids[:at], (ids[at] + 1) % 512, *ids[at + 1 :]]
        full = model.cache()
        assert store.load(other, full).tokens == at // CHUNK * CHUNK
        assert model.wrong_rows(full, other) == 0


@pytest.mark.fault("identity", "field by field: a miss, its reason logged")
@pytest.mark.parametrize("name", sorted({*IDENTITY.public(), "tenant"}))
def test_another_identity_is_a_miss_and_the_reason_is_logged(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = Model(layers(2)), tokens(3 * CHUNK)
    model.prefill(model.cache(), ids, make_store(model, tmp_path))
    other = make_store(model, tmp_path, changed(name))
    full = model.cache()
    with caplog.at_level(logging.INFO, "vericache.stores"):
        loaded = other.load(ids, full)
    assert (loaded.tokens, loaded.bytes, loaded.faults, full.tokens) == (0, 0, (), 0)
    if name == "tenant":  # one tenant must not learn what another has stored
        assert loaded.reason == "nothing is stored for these tokens and this tenant"
    elif name == "format":  # notes have a format, too
        assert "nothing is stored" in loaded.reason or "format" in loaded.reason
    else:
        assert loaded.reason == f"these tokens are stored, but with other {name}"
    assert loaded.reason in caplog.text


@pytest.mark.fault("identity", "the reason of a miss names each field")
def test_the_reason_names_every_field_that_differs(tmp_path: Path) -> None:
    model, ids = Model(layers(2)), tokens(CHUNK)
    model.prefill(model.cache(), ids, make_store(model, tmp_path))
    both = PrefixIdentity(**{**IDENTITY.__dict__, "dtype": "bfloat16", "weights": "v"})
    assert make_store(model, tmp_path, both).load(ids, model.cache()).reason.endswith("other dtype, weights")


def test_what_was_evicted_is_told_apart_from_what_never_was(tmp_path: Path) -> None:
    model, ids = Model(layers(2)), tokens(2 * CHUNK)
    store = make_store(model, tmp_path)
    model.prefill(model.cache(), ids, store)
    keys = store.keys(ids)
    store.blobs.delete(keys[1], deadline=time.monotonic() + 9)
    assert store.load(ids, model.cache()).reason == "chunk 1 is not stored"
    store.blobs.delete(keys[0], deadline=time.monotonic() + 9)
    assert "not stored any more" in store.load(ids, model.cache()).reason
    assert "nothing is stored" in store.load(tokens(256, seed=9), model.cache()).reason


@pytest.mark.fault("nonsense", "a note of what was stored")
@pytest.mark.parametrize("note", [b"", b"junk", b"[1]", b"[" * 70000, b'{"dtype": 3}', b"\xff\xfe", b"9" * 5000])
def test_a_damaged_note_spoils_only_the_reason(note: bytes, tmp_path: Path) -> None:
    model, ids = Model(layers(2)), tokens(CHUNK)
    first = make_store(model, tmp_path)
    model.prefill(model.cache(), ids, first)
    (index,) = [file for file in (tmp_path / "blobs").iterdir() if file.name.startswith("index-")]
    index.unlink()
    first.blobs.put(index.name, [note], deadline=time.monotonic() + 9)
    loaded = make_store(model, tmp_path, changed("dtype")).load(ids, model.cache())
    assert (loaded.tokens, loaded.faults) == (0, ())
    assert loaded.reason


def test_different_chunk_sizes_share_a_store_without_mixing(tmp_path: Path) -> None:
    model, ids = Model(layers(2)), tokens(4 * CHUNK)
    small = make_store(model, tmp_path)
    large = PrefixStore(small.blobs, IDENTITY, model.layers, 2 * CHUNK)
    full = model.cache()
    model.prefill(full, ids, small)
    assert large.load(ids, model.cache()).tokens == 0
    assert large.save(ids, full) == 2
    for store in (small, large):
        again = model.cache()
        assert store.load(ids, again).tokens == 4 * CHUNK
        assert model.wrong_rows(again, ids) == 0


def test_only_rows_that_count_are_saved(tmp_path: Path) -> None:
    model, ids = Model(layers(2)), tokens(3 * CHUNK)
    store, full = make_store(model, tmp_path), model.cache()
    model.prefill(full, ids[: 2 * CHUNK - 1])
    assert store.save(ids, full) == 1  # the second chunk lacks a row, whatever the pages hold
    full.rollback(CHUNK)
    assert make_store(model, tmp_path / "other").save(ids, full) == 0


def test_a_window_that_moved_on_cannot_be_saved(tmp_path: Path) -> None:
    model, ids = Model(layers(2, 8)), tokens(3 * CHUNK)
    full = model.cache()
    model.prefill(full, ids)
    with pytest.raises(IndexError, match="released"):
        make_store(model, tmp_path).save(ids, full)


def test_a_captured_chunk_no_longer_depends_on_the_cache(tmp_path: Path) -> None:
    model, ids = Model(layers(2)), tokens(CHUNK)
    store, full = make_store(model, tmp_path), model.cache()
    model.prefill(full, ids)
    chunk = store.capture(ids, full, 0)
    for layer in model.layers:
        for part in full.device_pages(layer.index).page(0):
            part.fill_(float("nan"))
    store.put(chunk)
    again = model.cache()
    assert store.load(ids, again).tokens == CHUNK
    assert model.wrong_rows(again, ids) == 0


@pytest.mark.usefixtures("vericache_registry")
def test_compressed_kv_comes_back_under_its_own_key(tmp_path: Path) -> None:
    model, ids = Model(layers(2)), tokens(300)
    full, store = model.cache(), make_store(model, tmp_path)
    model.prefill(full, ids)
    view = PrefixView(model.layers, ids, lambda layer: full.read(layer, 0, full.tokens))
    compressor: Compressor = default_registry().create("random", {"keep": 0.25})
    compressed = compressor.compress(view, CompressContext())
    packed = store.compressed.capture(ids, compressed, protected=[(0, 4)])
    store.put(packed)
    key = packed.key
    assert key.startswith("compressed-")
    found = store.compressed.load(ids, compressor, protected=[(0, 4)])
    assert found.compressed is not None
    assert found.compressed.to_payload() == compressed.to_payload()
    for asked, other, steering in (
        (ids, compressor, {}),
        (ids[:-1], compressor, {"protected": [(0, 4)]}),
        (ids, default_registry().create("random", {"keep": 0.5}), {"protected": [(0, 4)]}),
        (ids, default_registry().create("identity"), {"protected": [(0, 4)]}),
        (ids, compressor, {"protected": [(0, 4)], "seed": 1}),
    ):
        assert store.compressed.load(asked, other, **steering) == LoadedCompressed()
    elsewhere = make_store(model, tmp_path, changed("tenant")).compressed
    assert elsewhere.load(ids, compressor, protected=[(0, 4)]) == LoadedCompressed()
    assert (store.counts.compressed_saved, store.counts.compressed_loaded, store.counts.compressed_misses) == (1, 1, 5)
    with pytest.raises(PayloadError, match="cannot stand for"):
        store.compressed.capture(ids[:-1], compressed)


@pytest.mark.fault("swapped", "compressed KV: in another's place, forged, flipped")
@pytest.mark.usefixtures("vericache_registry")
@pytest.mark.parametrize("how", ["flipped", "another prefix", "another compressor", "lacks a layer", "full KV", "hangs up"])
def test_compressed_kv_that_is_in_doubt_is_a_fault_and_removed(how: str, tmp_path: Path) -> None:
    model, ids = Model(layers(2)), tokens(CHUNK)
    full, store = model.cache(), make_store(model, tmp_path)
    model.prefill(full, ids, store)
    view = PrefixView(model.layers, ids, lambda layer: full.read(layer, 0, full.tokens))
    compressor: Compressor = default_registry().create("random", {"keep": 0.25})
    compressed = compressor.compress(view, CompressContext())
    packed = store.compressed.capture(ids, compressed)
    store.put(packed)
    file = tmp_path / "blobs" / packed.key
    if how == "flipped":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif how == "full KV":
        file.write_bytes((tmp_path / "blobs" / store.keys(ids)[0]).read_bytes())
    elif how == "hangs up":
        store.compressed.blobs = Mock(get=Mock(side_effect=RuntimeError("hung up")))
    else:  # a forger who can write headers with fitting checksums
        forged = {
            "another prefix": replace(compressed, tokens=CHUNK, descriptors=tuple(reversed(compressed.descriptors))),
            "another compressor": replace(compressed, compressor="identity", options={}),
            "lacks a layer": replace(compressed, layers=(None, compressed.layers[1])),
        }[how]
        file.unlink()
        store.put(replace(packed, parts=[forged.to_payload()]))
    found = store.compressed.load(ids, compressor, needed=[0, 1])
    assert found.compressed is None
    assert found.fault is not None
    assert store.counts.faults == 1
    assert file.exists() == (how == "hangs up")


@pytest.mark.fault("swapped", "compressed KV under a key of full KV")
@pytest.mark.usefixtures("vericache_registry")
def test_compressed_kv_under_a_full_key_is_refused_and_removed(tmp_path: Path) -> None:
    model, ids = Model(layers(2)), tokens(CHUNK)
    full, store = model.cache(), make_store(model, tmp_path)
    model.prefill(full, ids, store)
    view = PrefixView(model.layers, ids, lambda layer: full.read(layer, 0, full.tokens))
    compressor: Compressor = default_registry().create("random", {"keep": 0.25})
    lossy = store.compressed.capture(ids, compressor.compress(view, CompressContext()))
    store.put(lossy)
    (key,) = store.keys(ids)
    (tmp_path / "blobs" / key).write_bytes((tmp_path / "blobs" / lossy.key).read_bytes())
    again = model.cache()
    loaded = store.load(ids, again)
    assert (loaded.tokens, again.tokens) == (0, 0)
    assert "role" in loaded.faults[0]
    assert store.blobs.contains([key], deadline=time.monotonic() + 9) == [False]


class Slow:
    """A backend that takes its time for each call, and keeps no deadline."""

    def __init__(self, blobs: DiskBlobs, seconds: float) -> None:
        self._blobs, self._seconds = blobs, seconds

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._blobs, name)

        def slowly(*args: Any, **kwargs: Any) -> Any:
            time.sleep(self._seconds)
            return call(*args, **kwargs)

        return slowly if name in {"get", "contains"} else call


def test_what_came_before_the_deadline_counts(tmp_path: Path) -> None:
    model, ids = Model(layers(2)), tokens(6 * CHUNK)
    store = make_store(model, tmp_path)
    model.prefill(model.cache(), ids, store)
    slow: Any = Slow(DiskBlobs(tmp_path), 0.05)
    full = model.cache()
    loaded = PrefixStore(slow, IDENTITY, model.layers, CHUNK, timeout=0.2).load(ids, full)
    assert loaded.tokens < 6 * CHUNK
    assert "too long" in loaded.faults[0]
    assert model.wrong_rows(full, ids) == 0
    with pytest.raises(StoreTimeout):
        store.lookup(ids, deadline=time.monotonic() - 1)


@pytest.mark.fault("nonsense", "a backend")
@pytest.mark.parametrize(
    "answer", [None, [], [True], [True] * 99, "yes", StoreError("down"), OSError("gone"), KeyError("bug"), MemoryError()]
)
def test_a_backend_that_answers_nonsense_costs_the_prefix(answer: Any, tmp_path: Path) -> None:
    model, ids = Model(layers(2)), tokens(3 * CHUNK)
    store = make_store(model, tmp_path)
    model.prefill(model.cache(), ids, store)

    def give(*_: Any, **__: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    for name in ("contains", "get"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store.blobs, name, give)
            full = model.cache()
            loaded = store.load(ids, full)
        assert (loaded.tokens, full.tokens) == (0, 0)
        assert loaded.faults or (name == "get" and answer is None)
    full = model.cache()
    assert store.load(ids, full).tokens == 3 * CHUNK
    assert model.wrong_rows(full, ids) == 0


@pytest.mark.fault("tenants", "keys, and blobs put under them")
def test_tenants_cannot_meet(tmp_path: Path) -> None:
    """Eight threads with vocabularies of their own on one small store: every row is one's own."""
    described = layers(2)
    budget = 20 * 128 * 5 * 4 * 2
    failures: list[str] = []
    hits = [0] * 8

    def work(tenant: int) -> None:
        model = Model(described, seed=tenant)  # as if each had other weights: a foreign row is a wrong row
        identity = PrefixIdentity(**{**IDENTITY.__dict__, "tenant": f"tenant {tenant}"})
        store = PrefixStore(DiskBlobs(tmp_path, budget, durable=False), identity, described, CHUNK, timeout=60)
        prompts = ([tenant * 1000 + token for token in tokens(2 * CHUNK + 9, seed=turn // 2 % 3)] for turn in range(20))
        hits[tenant], wrong = live_on(model, store, prompts)
        failures.extend(f"{tenant}: {what}" for what in wrong)

    threads = [threading.Thread(target=work, args=(tenant,)) for tenant in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sum(hits) > 0


@pytest.mark.fault("tenants", "the same tokens")
def test_tenants_with_the_same_tokens_cannot_meet(tmp_path: Path) -> None:
    model, ids = Model(layers(2)), tokens(3 * CHUNK)
    model.prefill(model.cache(), ids, make_store(model, tmp_path))
    assert make_store(model, tmp_path, changed("tenant")).load(ids, model.cache()).tokens == 0


def test_nothing_stays_open(tmp_path: Path) -> None:
    model, ids = Model(layers(2)), tokens(4 * CHUNK)
    store = make_store(model, tmp_path)
    model.prefill(model.cache(), ids, store)
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        store.load(ids, model.cache())
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    store.close()
    store.close()
