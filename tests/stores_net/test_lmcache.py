# mypy: disable-error-code="comparison-overlap"
"""The LMCache backend, in an environment that has LMCache: memory only, and with files behind it."""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.stores_net.servers import eventually
from vericache_core.errors import ConfigError, StoreError, StoreFull, StoreTimeout, UsageError
from vericache_core.stores.blobs import BlobStore

pytest.importorskip("lmcache", reason="lmcache is not installed")
with warnings.catch_warnings():  # of what LMCache imports
    warnings.simplefilter("ignore")
    from vericache_core.stores.lmcache import LMCacheBlobs, _piece_keys, _record_key
from vericache_core.stores.url import open_store

# LMCache loads its adapters late, and their libraries warn.
pytestmark = pytest.mark.filterwarnings("ignore")
MEMORY = 64 << 20


def later() -> float:
    return time.monotonic() + 120


def files(folder: Path) -> list[dict[str, Any]]:
    return [{"type": "fs", "base_path": str(folder)}]


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What libraries open once for the whole process is no leak of a test."""
    made = LMCacheBlobs(files(tmp_path_factory.mktemp("warm")), memory_bytes=MEMORY)
    made.put("k", [b"x"], deadline=later())
    made.close()
    del made
    gc.collect()


@pytest.fixture(params=["memory", "files"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LMCacheBlobs]:
    made = LMCacheBlobs(files(tmp_path) if request.param == "files" else [], memory_bytes=MEMORY)
    yield made
    made.close()
    made.close()
    gc.collect()


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 32, (1 << 20) - 31, 5_000_000])
def test_round_trip(store: LMCacheBlobs, size: int) -> None:
    blob = os.urandom(size)
    assert store.get("k", deadline=later()) is None
    store.put("k", [blob[: size // 3], memoryview(blob)[size // 3 :]], deadline=later())
    found = store.get("k", deadline=later())
    assert found == blob
    assert found is not None
    assert found.readonly
    assert store.contains(["k", "l"], deadline=later()) == [True, False]
    store.put("k", [b"another"], deadline=later())
    assert store.get("k", deadline=later()) == blob
    store.delete("k", deadline=later())
    store.delete("k", deadline=later())
    assert store.get("k", deadline=later()) is None


def test_it_is_a_blob_store(store: LMCacheBlobs) -> None:
    assert isinstance(store, BlobStore)
    with store.pinned(["k"]):
        assert store.contains([], deadline=later()) == []
    with pytest.raises(UsageError):
        store.get("../k", deadline=later())
    with pytest.raises(StoreTimeout):
        store.get("k", deadline=time.monotonic() - 1)
    with pytest.raises(StoreFull):
        store.put("k", [bytes(2 * MEMORY)], deadline=later())
    assert store.get("k", deadline=later()) is None
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.get("k", deadline=later())


def test_blobs_come_back_from_files_after_a_restart(tmp_path: Path) -> None:
    blobs = {key: os.urandom(3_000_000) for key in "abc"}
    first = LMCacheBlobs(files(tmp_path), memory_bytes=MEMORY)
    for key, blob in blobs.items():
        first.put(key, [blob], deadline=later())
    eventually(lambda: len(list(tmp_path.rglob("*.data"))) == 3 * (1 + 3))
    first.close()
    second = LMCacheBlobs(files(tmp_path), memory_bytes=MEMORY)
    for key, blob in blobs.items():
        assert second.get(key, deadline=later()) == blob
    second.close()
    gc.collect()


def test_pieces_evicted_from_under_their_record_are_a_miss_and_a_put_heals_it(store: LMCacheBlobs) -> None:
    blob = os.urandom(3_000_000)
    for lost in range(3):
        store.put("k", [blob], deadline=later())
        record = store._record("k", later())
        assert record is not None
        count, _, nonce = record
        key = _piece_keys("k", nonce, count)[lost]
        time.sleep(0.2)  # until the adapter has it, so that it is not written after it was deleted
        for _, adapter in store._manager.l2_adapters():
            adapter.delete([key])
        store._manager.delete_l1_keys([key])
        assert store.get("k", deadline=later()) is None
        assert store.contains(["k"], deadline=later()) == [False]


def test_a_record_that_is_none_of_ours(store: LMCacheBlobs) -> None:
    for record in (os.urandom(64), bytes(64)):
        store._write([_record_key("k")], iter([[record]]), 64)
        with pytest.raises(StoreError):
            store.get("k", deadline=later())
        for _, adapter in store._manager.l2_adapters():
            eventually(lambda adapter=adapter: adapter.get_usage() is not None)
            time.sleep(0.2)
            adapter.delete([_record_key("k")])
        store._manager.delete_l1_keys([_record_key("k")])


def test_reads_leave_no_lock(store: LMCacheBlobs) -> None:
    store.put("k", [bytes(3_000_000)], deadline=later())
    for _ in range(3):
        assert store.get("k", deadline=later()) is not None
    record = store._record("k", later())
    assert record is not None
    keys = [_record_key("k"), *_piece_keys("k", record[2], record[0])]
    deleted, skipped = store._manager.delete_l1_keys(keys)
    assert (deleted, skipped) == (len(keys), 0)


def test_adapters_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="serializer"):
        LMCacheBlobs([{**files(tmp_path)[0], "serde": {"type": "fp8"}}], memory_bytes=MEMORY)
    with pytest.raises(ConfigError, match="does not accept"):
        LMCacheBlobs([{"type": "nonsense"}], memory_bytes=MEMORY)


def test_by_url(tmp_path: Path) -> None:
    config = tmp_path / "adapters.json"
    config.write_text(f'[{{"type": "fs", "base_path": "{tmp_path}/blobs"}}]')
    opened = open_store(f"lmcache://{config}?bytes=64MiB&timeout=60")
    opened.blobs.put("k", [b"x"], deadline=later())
    assert opened.blobs.get("k", deadline=later()) == b"x"
    opened.blobs.close()
    config.write_text("{}")
    with pytest.raises(ConfigError, match="no JSON list"):
        open_store(f"lmcache://{config}")
    gc.collect()
