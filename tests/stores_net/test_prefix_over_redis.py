"""Full KV through the prefix store, the client and Redis, while the server does everything wrong that it can."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from tests.fault_table import Tally
from tests.stores.support import CHUNK, IDENTITY, Model, layers, tokens
from tests.stores_net.servers import Command, CutOff, FakeRedis, RealRedis
from vericache_core.stores.client import StoreClient
from vericache_core.stores.client_policy import ClientPolicy
from vericache_core.stores.guarded import GuardedStore
from vericache_core.stores.prefix import PrefixStore

pytest.importorskip("redis")
from vericache_core.stores.redis import RedisBlobs

FAULTS = ("flip", "cut off", "short", "twice", "hang", "error", "another key", "empty", "held back")


def prefix_store(url: str, model: Model) -> PrefixStore:
    client = StoreClient(RedisBlobs(url), ClientPolicy(failures=4, rest=0.02, backoff=0.005, seed=0))
    return PrefixStore(GuardedStore(client), IDENTITY, model.layers, CHUNK, timeout=60)


def damage(fake: FakeRedis, kind: str, drawn: random.Random, rate: float) -> Callable[[Command, bytes], bytes]:
    held: list[bytes] = []

    def fault(command: Command, reply: bytes) -> bytes:
        if drawn.random() > rate:
            return reply
        match kind:
            case "flip":
                changed = bytearray(reply)
                changed[drawn.randrange(len(reply))] ^= 1 << drawn.randrange(8)
                return bytes(changed)
            case "cut off":
                raise CutOff
            case "short":
                return reply[: drawn.randrange(len(reply))]
            case "twice":
                return reply * 2
            case "hang":
                fake.released.wait(0.05)
                return reply
            case "error":
                return b"-ERR no\r\n"
            case "another key":
                keys = [key for key in fake.values if key.startswith(b"vericache:")]
                return fake._answer([command[0], drawn.choice(keys), *command[2:]]) if len(command) > 1 else reply
            case "empty":
                return b"$-1\r\n"
            case _:
                held.append(reply)
                return held.pop(0) if len(held) > 1 else b""

    return fault


@pytest.mark.fault("nonsense", "nine faults in 2, 10 or 50 % of the replies of Redis")
@pytest.mark.parametrize("kind", FAULTS)
def test_whatever_the_server_does_no_row_is_wrong(fake: FakeRedis, kind: str, tally: Tally) -> None:
    model, ids = Model(layers(2)), tokens(7 * CHUNK + 30)
    drawn = random.Random(kind)
    store = prefix_store(fake.url, model)
    first = model.cache()
    model.prefill(first, ids, store)
    first.close()
    assert store.counts.chunks_saved == 7
    came = 0
    for number in range(12):
        fake.fault = damage(fake, kind, drawn, rate=(0.02, 0.1, 0.5)[number % 3])
        full = model.cache()
        loaded = store.load(ids, full, most=len(ids) - 1, deadline=time.monotonic() + 0.4)
        came += loaded.tokens
        model.prefill(full, ids)
        tally.add(wrong=model.wrong_rows(full, ids))
        full.close()
    fake.fault = lambda _command, reply: reply
    store.close()
    assert came > 0


def test_through_the_real_server(real: RealRedis) -> None:
    model, ids = Model(layers(2)), tokens(7 * CHUNK + 30)
    store = prefix_store(real.url, model)
    full = model.cache()
    model.prefill(full, ids, store)
    full.close()
    full = model.cache()
    assert store.load(ids, full).tokens == 7 * CHUNK
    assert model.wrong_rows(full, ids) == 0
    full.close()
    real.kill()
    full = model.cache()
    loaded = store.load(ids, full)
    assert (loaded.tokens, bool(loaded.faults)) == (0, True)
    model.prefill(full, ids)
    assert model.wrong_rows(full, ids) == 0
    full.close()
    store.close()
