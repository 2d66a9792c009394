"""A clock that is wrong, jumps or runs backwards: order of eviction may suffer, blobs and budget may not."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fault_table import Tally
from tests.stores.support import CHUNK, IDENTITY, Model, layers, tokens
from vericache_core.stores import memory
from vericache_core.stores.disk import DiskBlobs
from vericache_core.stores.memory import SharedMemoryBlobs
from vericache_core.stores.prefix import PrefixStore

YEAR = 365 * 24 * 3600 * 10**9
DRAW = random.Random(3)
CLOCKS: dict[str, Callable[[int], int]] = {
    "1970": lambda now: now % YEAR,
    "a hundred years ahead": lambda now: now + 100 * YEAR,
    "stands still": lambda _now: 50 * YEAR,
    "runs backwards": lambda now: 100 * YEAR - now,
    "jumps": lambda now: now + DRAW.randrange(-20, 20) * YEAR,
}


@pytest.mark.fault("clock", "1970, ahead, standing, backwards, jumping")
@pytest.mark.parametrize("kind", ["file", "shm"])
@pytest.mark.parametrize("clock", CLOCKS)
def test_no_row_is_wrong_and_the_budget_holds(
    kind: str, clock: str, tally: Tally, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: CLOCKS[clock](real()))
    monkeypatch.setattr(memory, "ROOT", tmp_path)
    model = Model(layers(2))
    budget = 12 * CHUNK * 5 * 4 * 2
    stores = [SharedMemoryBlobs("test", budget) if kind == "shm" else DiskBlobs(tmp_path / "store", budget) for _ in range(2)]
    prompts = [tokens(3 * CHUNK + 9, seed=seed) for seed in range(6)]
    found = 0
    for turn, ids in itertools.product(range(3), prompts):
        blobs = stores[turn % 2]
        store = PrefixStore(blobs, IDENTITY, model.layers, CHUNK, timeout=60)
        for _ in range(2):  # what was just saved is there, whatever the time is said to be
            full = model.cache()
            loaded = store.load(ids, full)
            assert not loaded.faults
            tally.add(wrong=model.wrong_rows(full, ids))
            model.prefill(full, ids, store)
        found += loaded.tokens
        assert blobs.nbytes <= budget
    assert found > 0
