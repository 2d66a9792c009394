# mypy: disable-error-code="comparison-overlap"
"""The client under a clock that is moved by hand: nothing here depends on how fast the machine is."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from tests.stores_net.servers import FakeClock, eventually
from vericache_core.errors import ConfigError, StoreError, StoreFull, StoreTimeout, UsageError
from vericache_core.stores.blobs import BlobStore, Buffer
from vericache_core.stores.client import StoreClient
from vericache_core.stores.client_policy import ClientPolicy
from vericache_core.stores.guarded import GuardedStore


class Scripted:
    """A store in memory whose calls first do what the script says for their key."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.script: dict[str, Callable[[], None]] = {}
        self.calls: list[str] = []
        self.closed = self.hanging = 0
        self.gate = threading.Event()

    def hang(self) -> None:
        self.hanging += 1
        self.gate.wait(60)

    def _begin(self, key: str) -> None:
        self.calls.append(key)
        self.script.get(key, lambda: None)()

    def get(self, key: str, *, deadline: float) -> memoryview | None:
        self._begin(key)
        return memoryview(self.blobs[key]) if key in self.blobs else None

    def put(self, key: str, parts: Sequence[Buffer], *, deadline: float) -> None:
        self._begin(key)
        self.blobs[key] = b"".join(parts)

    def contains(self, keys: Sequence[str], *, deadline: float) -> list[bool]:
        return [key in self.blobs for key in keys]

    def delete(self, key: str, *, deadline: float) -> None:
        self.blobs.pop(key, None)

    def pinned(self, keys: Sequence[str]) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        self.closed += 1
        self.gate.set()


def raising(error: Exception) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


class Setting:
    def __init__(self, **policy: Any) -> None:
        self.clock, self.store = FakeClock(), Scripted()
        self.client = StoreClient(self.store, ClientPolicy(**{"timeout": 1.0, "seed": 0, **policy}), clock=self.clock)

    def until_hanging(self, number: int) -> None:
        eventually(lambda: self.store.hanging == number)


@pytest.fixture
def setting() -> Iterator[Callable[..., Setting]]:
    made: list[Setting] = []

    def make(**policy: Any) -> Setting:
        made.append(Setting(**policy))
        return made[-1]

    yield make
    for one in made:
        one.store.gate.set()
        one.client.close(timeout=0)
        counts = one.client.counts
        assert (counts.queued, counts.running, counts.hung, counts.threads) == (0, 0, 0, 0)


def test_calls_reach_the_store_and_are_counted(setting: Callable[..., Setting]) -> None:
    client = setting().client
    assert client.get("k").result(60) is None
    client.put("k", [b"ab", bytearray(b"c")]).result(60)
    assert client.get("k").result(60) == b"abc"
    assert client.contains(["k", "l"]).result(60) == [True, False]
    client.delete("k").result(60)
    counts = client.counts
    assert (counts.answered, counts.hits, counts.misses, counts.bytes_read, counts.bytes_written) == (5, 1, 1, 3, 3)
    assert (counts.failed, counts.timed_out, counts.refused, counts.retries, counts.late) == (0, 0, 0, 0, 0)


@pytest.mark.fault("hang", "a store: its late answer goes nowhere")
def test_deadline_holds_although_the_store_hangs_and_the_late_answer_goes_nowhere(setting: Callable[..., Setting]) -> None:
    one = setting()
    one.store.blobs = {"slow": b"late", "fast": b"right"}
    one.store.script["slow"] = one.store.hang
    slow = one.client.get("slow")
    one.until_hanging(1)
    one.clock.advance(0.999)
    assert not slow.done()
    one.clock.advance(0.001)
    with pytest.raises(StoreTimeout):
        slow.result(60)
    assert one.client.counts.hung == 1
    assert one.client.get("fast").result(60) == b"right"
    one.store.gate.set()
    eventually(lambda: one.client.counts.late == 1)
    eventually(lambda: one.client.counts.hung == 0)
    with pytest.raises(StoreTimeout):
        slow.result(0)
    assert one.client.counts.bytes_read == len(b"right")


@pytest.mark.fault("hang", "other calls of a store")
def test_a_call_that_waits_for_a_worker_ends_at_its_deadline_too(setting: Callable[..., Setting]) -> None:
    one = setting(workers=1, max_threads=1)
    one.store.script["slow"] = one.store.hang
    one.client.get("slow", deadline=one.clock.now() + 10)
    one.until_hanging(1)
    waiting = one.client.get("k")
    one.clock.advance(1)
    with pytest.raises(StoreTimeout):
        waiting.result(60)
    assert one.store.calls == ["slow"]
    assert one.client.counts.queued == 0


@pytest.mark.fault("hang", "without end: threads are bounded")
def test_a_store_that_hangs_does_not_eat_threads_without_end(setting: Callable[..., Setting]) -> None:
    one = setting(workers=2, max_threads=5, failures=1000)
    one.store.script["slow"] = one.store.hang
    for number in range(4):
        future = one.client.get("slow")
        one.until_hanging(number + 1)
        one.clock.advance(1)
        with pytest.raises(StoreTimeout):
            future.result(60)
    two = [one.client.get("slow") for _ in range(2)]
    one.until_hanging(5)
    assert (one.client.counts.threads, one.client.counts.queued) == (5, 1)
    one.clock.advance(1)
    for future in two:
        with pytest.raises(StoreTimeout):
            future.result(60)
    assert (one.client.counts.hung, one.client.counts.threads) == (5, 5)
    for _ in range(100):
        with pytest.raises(StoreError, match="5 threads hang"):
            one.client.get("fast").result(0)
    assert one.client.counts.threads == 5
    assert len(one.store.calls) == 5
    one.store.gate.set()
    eventually(lambda: one.client.counts.hung == 0)
    assert one.client.get("fast").result(60) is None
    eventually(lambda: one.client.counts.threads <= 2)


def test_a_full_queue_refuses(setting: Callable[..., Setting]) -> None:
    one = setting(workers=1, max_threads=1, queue=3)
    one.store.script["slow"] = one.store.hang
    first = one.client.get("slow")
    one.until_hanging(1)
    waiting = [one.client.get("k") for _ in range(3)]
    with pytest.raises(StoreError, match="3 calls wait"):
        one.client.get("k").result(0)
    one.store.gate.set()
    assert [future.result(60) for future in [first, *waiting]] == [None] * 4
    assert one.client.counts.refused == 1


def test_retries_with_growing_jitter_that_a_seed_fixes(setting: Callable[..., Setting]) -> None:
    def pauses(seed: int) -> list[float]:
        one = setting(attempts=5, failures=100, backoff=0.1, backoff_cap=0.4, timeout=100, seed=seed)
        times: list[float] = []

        def fail() -> None:
            times.append(one.clock.now())
            raise StoreError("no")

        one.store.script["k"] = fail
        future = one.client.get("k")
        while not future.done():
            one.clock.advance(0.001)
            if len(times) == 5:
                break
        with pytest.raises(StoreError, match="no"):
            future.result(60)
        assert one.client.counts.retries == 4
        return [after - before for before, after in itertools.pairwise(times)]

    first = pauses(1)
    # How far the clock was moved beyond a pause depends on thread timing, how long it is at least does not.
    drawn = random.Random(1)
    for number, pause in enumerate(first):
        assert pause >= drawn.uniform(0, min(0.4, 0.1 * 2**number)) - 1e-9


def test_a_retry_helps(setting: Callable[..., Setting]) -> None:
    one = setting(backoff=0)
    one.store.blobs["k"] = b"x"
    errors = [StoreError("once"), StoreError("twice")]

    def fail() -> None:
        if errors:
            raise errors.pop()

    one.store.script["k"] = fail
    assert one.client.get("k").result(60) == b"x"
    assert (one.client.counts.retries, one.client.counts.failed, one.client.breaker.state) == (2, 0, "closed")


def test_no_retry_that_would_begin_after_the_deadline(setting: Callable[..., Setting]) -> None:
    one = setting(backoff=1e9, backoff_cap=1e9)
    one.store.script["k"] = raising(StoreError("no"))
    with pytest.raises(StoreError, match="no"):
        one.client.get("k").result(60)  # at once, though the clock stands still
    assert one.store.calls == ["k"]


@pytest.mark.parametrize(
    ("error", "expected", "attempts"),
    [
        (StoreFull("full"), StoreFull, 1),
        (StoreTimeout("late"), StoreTimeout, 1),
        (UsageError("key"), UsageError, 1),
        (StoreError("no"), StoreError, 2),
        (OSError("broken"), StoreError, 2),
        (IndexError("a bug"), StoreError, 2),
        (MemoryError(), StoreError, 2),
    ],
)
def test_each_error_as_what_it_is(
    setting: Callable[..., Setting], error: Exception, expected: type[Exception], attempts: int
) -> None:
    one = setting(attempts=2, backoff=0)
    one.store.script["k"] = raising(error)
    with pytest.raises(expected) as caught:
        one.client.put("k", [b"x"]).result(60)
    assert type(caught.value) is expected
    assert len(one.store.calls) == attempts


@pytest.mark.fault("nonsense", "a backend, for a blob")
@pytest.mark.parametrize("reply", [7, "text", object(), [b"blob"], {"k": 1}, True, ...])
def test_nonsense_is_a_fault_of_the_store_and_no_end_of_its_thread(setting: Callable[..., Setting], reply: Any) -> None:
    one = setting(attempts=1, failures=3, workers=1, max_threads=1)
    store: Any = one.store
    store.get = lambda key, *, deadline: reply
    for _ in range(3):
        with pytest.raises(StoreError, match="no blob"):
            one.client.get("k").result(60)
    counts = one.client.counts
    assert (counts.failed, counts.hits, counts.hung, counts.threads) == (3, 0, 0, 1)
    assert one.client.breaker.state == "open"


@pytest.mark.fault("nonsense", "a backend, about keys")
@pytest.mark.parametrize("reply", [None, 7, [], [True], [True, False, True], "ab", {"k": True, "l": False}])
def test_nonsense_about_keys_is_a_fault_of_the_store(setting: Callable[..., Setting], reply: Any) -> None:
    one = setting(attempts=1)
    store: Any = one.store
    store.contains = lambda keys, *, deadline: reply
    with pytest.raises(StoreError, match="2 keys"):
        one.client.contains(["k", "l"]).result(60)
    store.contains = lambda keys, *, deadline: [True, False]
    assert one.client.contains(["k", "l"]).result(60) == [True, False]


@pytest.mark.fault("refused", "a store, until the breaker opens")
def test_breaker_refuses_at_once_and_probes_later(setting: Callable[..., Setting]) -> None:
    one = setting(attempts=1, failures=3, rest=5.0)
    one.store.script["k"] = raising(StoreError("down"))
    for _ in range(3):
        with pytest.raises(StoreError, match="down"):
            one.client.get("k").result(60)
    for _ in range(10):
        with pytest.raises(StoreError, match="left alone"):
            one.client.get("k").result(0)
    assert len(one.store.calls) == 3
    del one.store.script["k"]
    one.clock.advance(5)
    assert one.client.get("k").result(60) is None
    assert (one.client.breaker.state, one.client.counts.breaker_opened, one.client.counts.refused) == ("closed", 1, 10)


@pytest.mark.fault("hang", "a store, until the breaker opens")
def test_hangs_open_the_breaker_and_the_late_answers_change_nothing(setting: Callable[..., Setting]) -> None:
    one = setting(failures=2, rest=50.0)
    one.store.script["slow"] = one.store.hang
    futures = [one.client.get("slow") for _ in range(2)]
    one.until_hanging(2)
    one.clock.advance(1)
    for future in futures:
        with pytest.raises(StoreTimeout):
            future.result(60)
    assert one.client.breaker.state == "open"
    one.store.gate.set()
    eventually(lambda: one.client.counts.late == 2)
    assert one.client.breaker.state == "open"


@pytest.mark.fault("hang", "the probe of a breaker")
def test_a_hanging_probe_does_not_block_the_breaker_for_ever(setting: Callable[..., Setting]) -> None:
    one = setting(attempts=1, failures=1, rest=5.0)
    one.store.script = {"k": raising(StoreError("down")), "slow": one.store.hang}
    with pytest.raises(StoreError):
        one.client.get("k").result(60)
    one.clock.advance(5)
    probe = one.client.get("slow")
    one.until_hanging(1)
    with pytest.raises(StoreError, match="left alone"):
        one.client.get("fast").result(0)
    one.clock.advance(1)
    with pytest.raises(StoreTimeout):
        probe.result(60)
    one.clock.advance(5)
    assert one.client.get("fast").result(60) is None


@pytest.mark.fault("hang", "a put, whose buffer the caller uses again")
def test_a_put_that_hangs_does_not_see_its_buffer_reused(setting: Callable[..., Setting]) -> None:
    one = setting()
    one.store.script["slow"] = one.store.hang
    buffer = bytearray(b"first")
    future = one.client.put("slow", [buffer])
    one.until_hanging(1)
    one.clock.advance(1)
    with pytest.raises(StoreTimeout):
        future.result(60)
    buffer[:] = b"other"
    one.store.gate.set()
    eventually(lambda: "slow" in one.store.blobs)
    assert one.store.blobs["slow"] == b"first"


@pytest.mark.fault("closed", "the client, with calls under way")
def test_close_fails_what_is_under_way_and_leaves_no_thread(setting: Callable[..., Setting]) -> None:
    one = setting(workers=1, max_threads=2)
    one.store.script["slow"] = one.store.hang
    running, waiting = one.client.get("slow"), one.client.get("k")
    one.until_hanging(1)
    one.client.close(timeout=0)
    for future in (running, waiting):
        with pytest.raises(StoreError, match="closed"):
            future.result(0)
    with pytest.raises(StoreError, match="closed"):
        one.client.get("k").result(0)
    one.client.close()
    assert one.store.closed == 2
    eventually(lambda: one.client.counts.threads == 0)


def test_close_waits_for_calls_under_way(setting: Callable[..., Setting]) -> None:
    one = setting()
    one.store.script["slow"] = one.store.hang
    future = one.client.put("slow", [b"x"])
    one.until_hanging(1)
    closing = threading.Thread(target=one.client.close, args=[30.0])
    closing.start()
    eventually(lambda: one.client._closing)
    one.store.gate.set()
    closing.join(60)
    assert future.result(0) is None
    assert one.store.blobs["slow"] == b"x"


def test_a_callback_may_close_the_client(setting: Callable[..., Setting]) -> None:
    one = setting()
    closed = threading.Event()

    def close(_future: object) -> None:
        one.client.close(timeout=0)
        closed.set()

    one.client.get("k").add_done_callback(close)
    assert closed.wait(60)


@pytest.mark.fault("other", "many threads, a store that hangs now and then")
def test_no_call_of_many_threads_gets_the_blob_of_another(setting: Callable[..., Setting]) -> None:
    """One call in seven hangs beyond its deadline; every answer is that of its own key."""
    one = setting(workers=4, max_threads=64, queue=1000, failures=10_000)
    one.store.blobs = {f"k{number}": str(number).encode() for number in range(200)}
    for number in range(0, 200, 7):
        one.store.script[f"k{number}"] = one.store.hang
    futures = {number: one.client.get(f"k{number}", deadline=one.clock.now() + 1 + number) for number in range(200)}
    while not all(future.done() for future in futures.values()):
        one.clock.advance(0.5)
    one.store.gate.set()
    wrong = timeouts = 0
    for number, future in futures.items():
        try:
            found = future.result(0)
        except StoreTimeout:
            timeouts += 1
        else:
            wrong += found != str(number).encode()
    assert wrong == 0
    assert timeouts >= len(range(0, 200, 7))
    eventually(lambda: one.client.counts.hung == 0)
    counts = one.client.counts
    assert counts.answered + counts.timed_out == 200


def test_guarded_store_is_a_store_that_raises_what_the_futures_hold(setting: Callable[..., Setting]) -> None:
    one = setting()
    store = GuardedStore(one.client)
    assert isinstance(store, BlobStore)
    until = one.clock.now() + 1
    store.put("k", [b"x"], deadline=until)
    assert store.get("k", deadline=until) == b"x"
    assert store.contains(["k", "l"], deadline=until) == [True, False]
    with store.pinned(["k"]):
        store.delete("k", deadline=until)
    assert store.get("k", deadline=until) is None
    one.store.script["k"] = one.store.hang
    errors: list[StoreError] = []

    def call() -> None:
        try:
            store.get("k", deadline=until)
        except StoreError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    one.until_hanging(1)
    one.clock.advance(1)
    thread.join(60)
    assert [type(error) for error in errors] == [StoreTimeout]
    store.close()


@pytest.mark.fault("settings", "a policy of the client")
@pytest.mark.parametrize(
    "bad", [{"workers": 0}, {"max_threads": 3}, {"queue": 0}, {"attempts": 0}, {"failures": 0}, {"timeout": 0}, {"rest": -1}]
)
def test_bad_policies(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ClientPolicy(**bad)


def test_with_real_time_the_deadline_holds_without_anyone_moving_a_clock() -> None:
    store = Scripted()
    store.script["slow"] = store.hang
    client = StoreClient(store, ClientPolicy(timeout=0.05))
    with pytest.raises(StoreTimeout):
        client.get("slow").result(60)
    client.close(timeout=0)
    eventually(lambda: client.counts.threads == 0)
