"""Redis dies and comes back, empty, while a prefix is loaded: before the lookup, before each chunk, and before the last."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault_table import Tally
from tests.stores.support import CHUNK, IDENTITY, Model, layers, tokens
from tests.stores_net.servers import RealRedis
from vericache_core.stores.client import StoreClient
from vericache_core.stores.client_policy import ClientPolicy
from vericache_core.stores.guarded import GuardedStore
from vericache_core.stores.prefix import PrefixStore

CHUNKS = 7


@pytest.mark.fault("redis", "before the lookup or any of 7 chunks; comes back empty, or not")
@pytest.mark.parametrize("back", [True, False], ids=["comes back", "stays away"])
def test_a_restart_between_any_two_calls(back: bool, tally: Tally, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("redis")
    from vericache_core.stores.redis import RedisBlobs

    real = RealRedis(tmp_path)
    try:
        model, ids = Model(layers(2)), tokens(CHUNKS * CHUNK + 30)
        for point in range(CHUNKS + 1):  # the lookup, then each chunk
            blobs = RedisBlobs(real.url)
            client = StoreClient(blobs, ClientPolicy(timeout=5.0, failures=3, rest=0.02, backoff=0.005, seed=0))
            store = PrefixStore(GuardedStore(client), IDENTITY, model.layers, CHUNK, timeout=20)
            full = model.cache()
            model.prefill(full, ids)
            assert store.save(ids, full) == CHUNKS
            calls = 0

            def dying(call: str, point: int = point, blobs: RedisBlobs = blobs) -> None:
                original = getattr(blobs, call)

                def run(*args: object, **named: object) -> object:
                    nonlocal calls
                    calls += 1
                    if calls == point + 1:
                        real.kill()
                        if back:
                            real.start()
                    return original(*args, **named)

                monkeypatch.setattr(blobs, call, run)

            dying("contains")
            dying("get")
            full = model.cache()
            loaded = store.load(ids, full)
            assert loaded.tokens <= max(0, point - 1) * CHUNK, "a chunk came out of a server that had forgotten it"
            assert loaded.tokens == full.tokens
            wrong = model.wrong_rows(full, ids)
            if not back:
                real.start()
            model.prefill(full, ids)
            tally.add(wrong=wrong + model.wrong_rows(full, ids))
            store.close()
        assert tally.cases == CHUNKS + 1
    finally:
        real.kill()
