"""Tenants on one store of each kind: eight threads, and a foreign row would be a wrong one."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fault_table import Tally
from tests.stores.support import CHUNK, IDENTITY, Model, layers, live_on, tokens
from tests.stores_net.servers import FakeRedis
from vericache_core.stores import memory
from vericache_core.stores.prefix import PrefixStore
from vericache_core.stores.url import open_store

TENANTS = 8
TURNS = 12
BUDGET = 40 * CHUNK * 5 * 4 * 2


@pytest.fixture(params=["file", "file, read", "shm", "memory", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A store that all tenants use."""
    monkeypatch.setattr(memory, "ROOT", tmp_path)
    if request.param == "redis":
        pytest.importorskip("redis")
        server = FakeRedis()
        yield server.url
        server.close()
    elif request.param == "memory":
        pytest.importorskip("fsspec")
        yield f"memory://tenants-{random.Random(str(tmp_path)).randrange(10**9)}"
    elif request.param == "shm":
        yield f"shm://tenants?bytes={BUDGET}"
    else:
        yield f"file://{tmp_path / 'store'}?bytes={BUDGET}" + ("&map=no" if "read" in request.param else "")


@pytest.mark.fault("tenants", "every kind of store, disjoint and shared vocabularies")
@pytest.mark.parametrize("vocabulary", ["disjoint", "shared"])
def test_no_tenant_gets_a_row_of_another(url: str, vocabulary: str, tally: Tally) -> None:
    """With one vocabulary all ask for the very same tokens, and only the salt keeps them apart."""
    described = layers(2)
    failures: list[str] = []
    hits = [0] * TENANTS

    def work(tenant: int) -> None:
        model = Model(described, seed=tenant)  # as if each had other weights: a foreign row is a wrong row
        with_salt = replace(IDENTITY, tenant=f"tenant {tenant}")
        opened = open_store(url)
        store = PrefixStore(opened.blobs, with_salt, described, CHUNK, timeout=120)
        try:
            first = tenant * 1000 if vocabulary == "disjoint" else 0
            prompts = ([first + token for token in tokens(2 * CHUNK + 9, seed=turn // 2 % 3)] for turn in range(TURNS))
            hits[tenant], wrong = live_on(model, store, prompts)
            failures.extend(f"{tenant}: {what}" for what in wrong)
        except BaseException as error:  # noqa: BLE001 (the main thread looks at it)
            failures.append(repr(error))
        finally:
            store.close()

    threads = [threading.Thread(target=work, args=(tenant,)) for tenant in range(TENANTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    tally.add(TENANTS * TURNS)
    assert all(hits), "nobody ever found a prefix of their own, so nothing was shown"
