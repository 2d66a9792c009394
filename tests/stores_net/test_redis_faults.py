# mypy: disable-error-code="comparison-overlap"
"""The fault table of the Redis backend, row by row: never a wrong blob, never past the deadline, nothing left open."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from tests.fault_table import Tally
from tests.stores_net.servers import Command, CutOff, FakeRedis, eventually
from vericache_core.errors import StoreError, StoreTimeout
from vericache_core.stores.blobs import Buffer
from vericache_core.stores.client import StoreClient
from vericache_core.stores.client_policy import ClientPolicy

pytest.importorskip("redis")
from vericache_core.stores.redis import RedisBlobs
from vericache_core.stores.resp import DeadlineSocket

WAIT = 0.3
BLOB = {"a": os.urandom(2_500_000), "b": os.urandom(2_500_000)}
WORDS = (b"STRLEN", b"WATCH", b"GETRANGE", b"MULTI", b"EXEC")
SETUP = (b"CLIENT", b"SELECT")


def soon() -> float:
    return time.monotonic() + WAIT


@pytest.fixture
def store(fake: FakeRedis) -> Iterator[RedisBlobs]:
    store = RedisBlobs(fake.url)
    for key, blob in BLOB.items():
        store.put(key, [blob], deadline=time.monotonic() + 120)
    yield store
    store.close()
    fake.released.set()
    eventually(lambda: fake.open_connections == 0)


def heals(fake: FakeRedis, store: RedisBlobs) -> None:
    """After the fault is over the same store serves the right blobs, over connections that are in step."""
    fake.fault, fake.pace = (lambda _command, reply: reply), (lambda sock, reply: sock.sendall(reply))
    for key, blob in BLOB.items():
        assert store.get(key, deadline=time.monotonic() + 120) == blob


def on(word: bytes, change: Callable[[bytes], bytes]) -> Callable[[Command, bytes], bytes]:
    return lambda command, reply: change(reply) if command[0] == word else reply


def cut_off(reply: bytes) -> bytes:
    raise CutOff(reply)


def half(sock: socket.socket, reply: bytes) -> None:
    sock.sendall(reply[: len(reply) // 2])
    raise CutOff


@pytest.mark.fault("refused", "Redis: get, put, contains")
def test_refused(fake: FakeRedis, store: RedisBlobs, tally: Tally) -> None:
    fake.close()
    with pytest.raises(StoreError):
        store.get("a", deadline=soon())
    with pytest.raises(StoreError):
        store.put("c", [b"x"], deadline=soon())
    with pytest.raises(StoreError):
        store.contains(["a"], deadline=soon())
    tally.add(3)


@pytest.mark.fault("hang", "Redis, at any step")
@pytest.mark.parametrize("word", WORDS)
def test_hang_at_every_step(fake: FakeRedis, store: RedisBlobs, word: bytes) -> None:
    def hang(command: Command, reply: bytes) -> bytes:
        if command[0] == word:
            fake.released.wait(20)
            raise CutOff
        return reply

    fake.fault = hang
    with pytest.raises(StoreTimeout):
        store.get("a", deadline=soon())
    heals(fake, store)


@pytest.mark.fault("hang", "Redis, while connecting")
@pytest.mark.parametrize("word", SETUP)
def test_hang_while_connecting(fake: FakeRedis, word: bytes) -> None:
    def hang(command: Command, reply: bytes) -> bytes:
        if command[0] == word:
            fake.released.wait(20)
            raise CutOff
        return reply

    fake.fault = hang
    store = RedisBlobs(fake.url.replace("/0", "/1"))
    with pytest.raises(StoreTimeout):
        store.get("a", deadline=soon())
    store.close()


@pytest.mark.fault("hang", "accepts and says nothing")
def test_accepts_and_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store = RedisBlobs(f"redis://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(StoreTimeout):
            store.get("a", deadline=soon())
        store.close()


@pytest.mark.fault("drip", "Redis, each byte within the timeout of a read")
@pytest.mark.parametrize("word", [*SETUP, *WORDS])
def test_a_byte_at_a_time(fake: FakeRedis, store: RedisBlobs, word: bytes) -> None:
    """Each byte comes well within the timeout of a single read, so only a deadline for all of them helps."""
    at_last = [False]

    def drip(sock: socket.socket, reply: bytes) -> None:
        if not at_last[0]:
            sock.sendall(reply)
            return
        for at in range(len(reply)):
            sock.sendall(reply[at : at + 1])
            if fake.released.wait(WAIT / 2):
                raise CutOff

    def fault(command: Command, reply: bytes) -> bytes:
        at_last[0] = command[0] == word
        return reply

    fake.fault, fake.pace = fault, drip
    fresh = RedisBlobs(fake.url.replace("/0", "/1"))
    with pytest.raises(StoreError):
        fresh.get("a", deadline=soon())
    fresh.close()
    fake.released.set()
    heals(fake, store)


@pytest.mark.fault("hang", "does not read")
def test_put_to_a_server_that_does_not_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store = RedisBlobs(f"redis://127.0.0.1:{listener.getsockname()[1]}")
        answered = threading.Event()

        def serve() -> None:
            sock, _ = listener.accept()
            sock.sendall(b"+OK\r\n" * 2)  # to CLIENT SETINFO, twice
            answered.wait(20)
            sock.close()

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(StoreTimeout):
            store.put("a", [bytes(64 << 20)], deadline=soon())
        answered.set()
        thread.join()
        store.close()


@pytest.mark.fault("closed", "Redis, at any step")
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("how", ["before", "within"])
def test_closes_at_every_step(fake: FakeRedis, store: RedisBlobs, word: bytes, how: str) -> None:
    if how == "before":
        fake.fault = on(word, cut_off)
    else:

        def fault(command: Command, reply: bytes) -> bytes:
            fake.pace = half if command[0] == word else (lambda sock, reply: sock.sendall(reply))
            return reply

        fake.fault = fault
    with pytest.raises(StoreError):
        store.get("a", deadline=soon())
    heals(fake, store)


@pytest.mark.fault("truncated", "Redis")
@pytest.mark.parametrize("truncated", range(1, 10))
def test_truncated_at_each_tenth(fake: FakeRedis, store: RedisBlobs, truncated: int) -> None:
    def tenth(sock: socket.socket, reply: bytes) -> None:
        if len(reply) > 1000:
            sock.sendall(reply[: len(reply) * truncated // 10])
            raise CutOff
        sock.sendall(reply)

    fake.pace = tenth
    with pytest.raises(StoreError):
        store.get("a", deadline=soon())
    heals(fake, store)


@pytest.mark.fault("length", "Redis")
@pytest.mark.parametrize("off", [-1_000_000, -1, 1, 2, 1_000_000])
@pytest.mark.parametrize("word", [b"STRLEN", b"GETRANGE"])
def test_wrong_length(fake: FakeRedis, store: RedisBlobs, word: bytes, off: int) -> None:
    def lie(reply: bytes) -> bytes:
        head, _, rest = reply.partition(b"\r\n")
        return b"%b%d\r\n%b" % (head[:1], int(head[1:]) + off, rest)

    fake.fault = on(word, lie)
    with pytest.raises(StoreError):
        store.get("a", deadline=soon())
    heals(fake, store)


@pytest.mark.fault("length", "absurd ones, before memory is asked for")
@pytest.mark.parametrize("size", [2**31, 2**40, 2**60, 2**63, 10**30, -2, -(2**63)])
@pytest.mark.parametrize("word", [b"STRLEN", b"GETRANGE"])
def test_absurd_length_is_refused_before_memory_is_asked_for(
    fake: FakeRedis, store: RedisBlobs, word: bytes, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

    asked: list[int] = []
    empty = np.empty

    def watched(size: int, dtype: type[np.uint8]) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        asked.append(size)
        return empty(size, dtype)

    monkeypatch.setattr(np, "empty", watched)
    sign = b":" if word == b"STRLEN" else b"$"
    fake.fault = on(word, lambda _reply: b"%b%d\r\n" % (sign, size))
    with pytest.raises(StoreError):
        store.get("a", deadline=soon())
    assert sum(asked) <= len(BLOB["a"])
    monkeypatch.undo()
    heals(fake, store)


@pytest.mark.fault("other", "Redis takes one key for another")
@pytest.mark.parametrize("word", WORDS[:1] + WORDS[2:3])
def test_answers_to_another_request(fake: FakeRedis, store: RedisBlobs, word: bytes) -> None:
    """The server takes one key for the other; lengths are the same, so only the tags tell."""
    swap = {b"vericache:a": b"vericache:b", b"vericache:b": b"vericache:a"}

    def other(command: Command, reply: bytes) -> bytes:
        if command[0] != word:
            return reply
        return fake._answer([command[0], swap[command[1]], *command[2:]])

    fake.fault = other
    if word == b"STRLEN":  # the same length: nothing to notice, nothing wrong
        assert store.get("a", deadline=soon()) == BLOB["a"]
    else:
        for key in BLOB:
            with pytest.raises(StoreError):
                store.get(key, deadline=soon())
    heals(fake, store)


@pytest.mark.fault("reordered", "replies of Redis")
def test_replies_in_another_order(fake: FakeRedis, store: RedisBlobs, tally: Tally) -> None:
    """Pieces of the same length change places: every pair of neighbours, tried one after the other."""
    for at in range(2):
        held: list[bytes] = []
        count = [0]

        def reorder(command: Command, reply: bytes, at: int = at, held: list[bytes] = held, count: list[int] = count) -> bytes:
            if command[0] != b"GETRANGE":
                return reply
            count[0] += 1
            if count[0] == at + 1:
                held.append(reply)
                return b""
            if count[0] == at + 2:
                return reply + held.pop()
            return reply

        fake.fault = reorder
        with pytest.raises(StoreError):
            store.get("a", deadline=soon())
        tally.add()
    heals(fake, store)


@pytest.mark.fault("doubled", "replies of Redis")
@pytest.mark.parametrize("word", WORDS)
def test_replies_twice(fake: FakeRedis, store: RedisBlobs, word: bytes, tally: Tally) -> None:
    fake.fault = on(word, lambda reply: reply * 2)
    for key, blob in list(BLOB.items()) * 3:
        tally.add()
        with suppress(StoreError):  # noticed at once, or by who uses the connection next
            tally.add(0, wrong=store.get(key, deadline=soon()) != blob)
    heals(fake, store)


@pytest.mark.fault("doubled", "Redis: more than the reply")
def test_more_than_the_reply_in_the_same_packet(fake: FakeRedis, store: RedisBlobs) -> None:
    fake.fault = on(b"UNLINK", lambda reply: reply + b":1\r\n")
    with pytest.raises(StoreError, match="more than the reply"):
        store.delete("c", deadline=soon())
    heals(fake, store)


@pytest.mark.fault("other", "late, to the next call")
def test_late_reply_is_not_delivered_to_the_next(fake: FakeRedis, store: RedisBlobs, tally: Tally) -> None:
    """The deadline passes, then the answer comes: whoever asks next must get their own."""
    for _ in range(5):
        late = threading.Event()

        def slow(command: Command, reply: bytes, late: threading.Event = late) -> bytes:
            if command[0] == b"GETRANGE" and command[1].endswith(b":a"):
                late.wait(20)
            return reply

        fake.fault = slow
        with pytest.raises(StoreTimeout):
            store.get("a", deadline=time.monotonic() + 0.05)
        late.set()
        tally.add(wrong=store.get("b", deadline=time.monotonic() + 120) != BLOB["b"])
    heals(fake, store)


@pytest.mark.fault("nonsense", "Redis, at any step")
@pytest.mark.parametrize(
    "line", [b"-ERR no", b"-LOADING not yet", b"-NOAUTH who", b"+MAYBE", b"hello", b"", b"\0" * 9000, b":x", b"$", b"*"]
)
@pytest.mark.parametrize("word", WORDS)
def test_errors_and_nonsense(fake: FakeRedis, store: RedisBlobs, word: bytes, line: bytes) -> None:
    fake.fault = on(word, lambda _reply: line + b"\r\n")
    with pytest.raises(StoreError):
        store.get("a", deadline=soon())
    heals(fake, store)


@pytest.mark.fault("refused", "Redis: a put")
def test_put_that_is_refused_raises(fake: FakeRedis, store: RedisBlobs) -> None:
    fake.fault = on(b"SET", lambda _reply: b"-READONLY You can't write against a read only replica.\r\n")
    with pytest.raises(StoreError, match="READONLY"):
        store.put("c", [b"x"], deadline=soon())
    fake.values.pop(b"vericache:c", None)
    heals(fake, store)


@pytest.mark.fault("closed", "while a put is sent")
@pytest.mark.parametrize("after", [0, 1, 30, 60, 100, 1_000_000, 2_499_999])
def test_put_broken_off_leaves_nothing(fake: FakeRedis, store: RedisBlobs, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection breaks after some bytes of the command: readers see no blob."""
    whole = DeadlineSocket.sendall
    left = [after]

    def breaks(self: DeadlineSocket, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        whole(self, view[: left[0]])
        left[0] -= min(left[0], len(view))
        if left[0] == 0:
            raise ConnectionResetError(104, "reset by the test")

    monkeypatch.setattr(DeadlineSocket, "sendall", breaks)
    with pytest.raises(StoreError):
        store.put("c", [BLOB["a"]], deadline=soon())
    monkeypatch.undo()
    assert store.get("c", deadline=time.monotonic() + 120) is None
    assert store.contains(["c", "a"], deadline=time.monotonic() + 120) == [False, True]


@pytest.mark.fault("stale", "Redis: replaced between pieces")
def test_replaced_while_it_is_read(fake: FakeRedis, store: RedisBlobs) -> None:
    fake.fault = on(b"EXEC", lambda _reply: b"*-1\r\n")
    with pytest.raises(StoreError, match="replaced or evicted"):
        store.get("a", deadline=soon())
    heals(fake, store)


@pytest.mark.fault("other", "8 threads, one reply in 29 damaged")
def test_no_connection_of_another_call_is_used(fake: FakeRedis, store: RedisBlobs, tally: Tally) -> None:
    """Eight threads, two keys, a server that fails one call in five in some way: every blob is the right one."""
    faults: list[Callable[[bytes], bytes]] = [
        cut_off,
        lambda reply: reply * 2,
        lambda reply: reply[:-3],
        lambda _reply: b":7\r\n",
    ]
    count, lock = [0], threading.Lock()

    def now_and_then(_command: Command, reply: bytes) -> bytes:
        with lock:
            count[0] += 1
            number = count[0]
        return faults[number // 29 % len(faults)](reply) if number % 29 == 0 else reply

    fake.fault = now_and_then
    wrong, right, failed = [0], [0], [0]

    def ask(key: str) -> None:
        for _ in range(6):
            try:
                ok = store.get(key, deadline=soon()) == BLOB[key]
            except StoreError:
                failed[0] += 1
                continue
            right[0], wrong[0] = right[0] + ok, wrong[0] + (not ok)

    threads = [threading.Thread(target=ask, args=["ab"[n % 2]]) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tally.add(right[0] + wrong[0] + failed[0], wrong[0])
    assert right[0] > 0
    assert failed[0] > 0
    heals(fake, store)


@pytest.mark.fault("refused", "Redis, until the breaker opens, and heals")
def test_the_breaker_opens_and_heals(fake: FakeRedis, store: RedisBlobs) -> None:
    """Behind the client: after three failures calls are refused at once; when the server is back they go through."""
    fake.fault = on(b"STRLEN", cut_off)
    client = StoreClient(store, ClientPolicy(attempts=1, failures=3, rest=0.1, timeout=WAIT))
    for _ in range(3):
        with pytest.raises(StoreError):
            client.get("a").result(20)
    before = len(fake.commands)
    with pytest.raises(StoreError, match="not tried"):
        client.get("a").result(20)
    assert len(fake.commands) == before
    fake.fault = lambda _command, reply: reply
    eventually(lambda: not client.breaker.refuses)
    assert client.get("a", deadline=time.monotonic() + 120).result(20) == BLOB["a"]
    assert client.breaker.state == "closed"
    client.close()
