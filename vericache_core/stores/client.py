"""Calls to a store that may hang, lie still or fail: in the background, with a deadline that holds whatever it does.

A call is a future. Worker threads make the calls, a watcher ends each at its deadline. A call that is ended so leaves
its thread behind, in whatever the backend waits for; what comes back later has nowhere to go and is dropped. Threads
left behind are replaced up to a limit, beyond which calls are refused at once.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Final

from vericache_core.errors import StoreError, StoreFull, StoreTimeout, VeriCacheError
from vericache_core.stores.blobs import BlobStore, Buffer, Checkable
from vericache_core.stores.breaker import CircuitBreaker
from vericache_core.stores.client_policy import ClientCounts, ClientPolicy
from vericache_core.stores.clock import Clock, MonotonicClock
from vericache_core.stores.keys import PROBE
from vericache_core.stores.pieces import length_of

LEFT_ALONE: Final = "the store failed too often and is left alone for a while"
_JOIN_SECONDS: Final = 1.0
"""How long ``close`` waits for threads after the store was closed under them."""


class _Call:
    """One call: what to do, until when, and for whom."""

    def __init__(self, what: str, attempt: Callable[[float], Any], deadline: float) -> None:
        self.what, self.attempt, self.deadline = what, attempt, deadline
        self.future: Future[Any] = Future()
        self.ticket: int | None = None
        """Of the breaker, while an attempt is under way whose outcome nobody has told it."""
        self.running = self.settled = False
        self.abandoned = False
        """Ended while its thread was in the backend."""


class StoreClient:
    """A ``BlobStore`` behind futures. Safe to use from several threads.

    Errors of the store reach the caller through the future, and only as ``StoreError`` and its kinds; a key that is
    none is a ``UsageError`` there. A future is never cancelled.

    Args:
        store: the backend; the client closes it.
        policy: see ``ClientPolicy``.
        clock: the time, of deadlines too.
    """

    def __init__(self, store: BlobStore, policy: ClientPolicy | None = None, *, clock: Clock | None = None) -> None:
        self.policy = policy = policy or ClientPolicy()
        self._store = store
        self._clock = clock or MonotonicClock()
        self.breaker = CircuitBreaker(policy.failures, policy.rest, self._clock.now)
        self._random = random.Random(policy.seed)  # noqa: S311  # jitter
        self._changed = threading.Condition()
        self._queue: deque[_Call] = deque()
        self._pending: set[_Call] = set()
        self._threads: set[threading.Thread] = set()
        self._watcher: threading.Thread | None = None
        self._idle = self._hung = 0
        self._closing = self._closed = False
        self._counts = ClientCounts()

    def get(self, key: str, *, deadline: float | None = None) -> Future[memoryview | None]:
        """The blob, or None if there is none."""
        return self._submit("get", lambda until: self._get(key, until), deadline)

    def put(self, key: str, parts: Sequence[Buffer], *, deadline: float | None = None, owned: bool = False) -> Future[None]:
        """Publish the concatenation of ``parts``.

        They are copied first, since a put that hangs may read them long after its deadline; ``owned`` says that nobody
        will ever change them, and saves that.
        """
        held: Sequence[Buffer] = list(parts) if owned else [b"".join(parts)]
        return self._submit("put", lambda until: self._put(key, held, until), deadline)

    def contains(self, keys: Sequence[str], *, deadline: float | None = None) -> Future[list[bool]]:
        """For each key whether there is a blob; a hint."""
        wanted = list(keys)
        return self._submit("contains", lambda until: self._contains(wanted, until), deadline)

    def delete(self, key: str, *, deadline: float | None = None) -> Future[None]:
        """Remove the blob, if there is one."""
        return self._submit("delete", lambda until: self._store.delete(key, deadline=until), deadline)

    def check(self, *, deadline: float | None = None) -> Future[None]:
        """See whether the store can be used: by its own ``check``, or by a lookup where it has none."""
        return self._submit("check", self._check, deadline)

    def pinned(self, keys: Sequence[str]) -> AbstractContextManager[None]:
        """Blobs that this process must not evict; asks nobody else, so it does not wait."""
        return self._store.pinned(keys)

    @property
    def counts(self) -> ClientCounts:
        """A consistent snapshot."""
        with self._changed:
            running = sum(call.running for call in self._pending)
            return replace(
                self._counts,
                breaker_opened=self.breaker.opened,
                queued=len(self._pending) - running,
                running=running,
                hung=self._hung,
                threads=len(self._threads),
            )

    def close(self, timeout: float = 1.0) -> None:
        """Wait up to ``timeout`` seconds for calls under way, fail the rest, close the store, end the threads.

        A thread that hangs even in a closed store is left behind; ``counts.hung`` tells. Safe to call twice.
        """
        with self._changed:
            first, self._closing = not self._closing, True
            until = self._clock.now() + timeout
            while first and self._pending and self._clock.now() < until:
                self._clock.wait(self._changed, until)
            self._closed = True
            left = list(self._pending)
            self._changed.notify_all()
        for call in left:
            self._end(call, StoreError("the store was closed", cause=f"{call.what} was under way"), "failed")
        self._store.close()
        with self._changed:
            threads = self._threads | ({self._watcher} if self._watcher else set())
        for thread in threads - {threading.current_thread()}:  # a callback of a future may close the client
            thread.join(_JOIN_SECONDS)

    # A backend may answer with anything: what makes no sense is a failure like any other, before anybody counts its bytes.

    def _get(self, key: str, deadline: float) -> memoryview | None:
        found: object = self._store.get(key, deadline=deadline)
        if found is None:
            return None
        if not isinstance(found, bytes | bytearray | memoryview):
            raise StoreError("the store answered with something that is no blob", cause=type(found).__name__)
        return memoryview(found)

    def _contains(self, keys: Sequence[str], deadline: float) -> list[bool]:
        found: object = self._store.contains(keys, deadline=deadline)
        if not isinstance(found, list) or len(found) != len(keys):
            raise StoreError(f"the store did not say of {len(keys)} keys whether they are there", cause=type(found).__name__)
        return [bool(there) for there in found]

    def _check(self, deadline: float) -> None:
        if isinstance(self._store, Checkable):
            self._store.check(deadline=deadline)
        else:
            self._contains([PROBE], deadline)

    def _put(self, key: str, parts: Sequence[Buffer], deadline: float) -> int:
        self._store.put(key, parts, deadline=deadline)
        return sum(map(length_of, parts))

    # From here on the life of a call: submitted, served by a worker or ended by the watcher, settled once.

    def _submit(self, what: str, attempt: Callable[[float], Any], deadline: float | None) -> Future[Any]:
        if deadline is None:
            deadline = self._clock.now() + self.policy.timeout
        call = _Call(what, attempt, deadline)
        call.future.set_running_or_notify_cancel()
        with self._changed:
            reason = self._refusal()
            if reason is None:
                self._pending.add(call)
                self._queue.append(call)
                self._staff()
                self._changed.notify_all()
            else:
                self._count(refused=1)
                call.settled = True
        if reason is not None:
            call.future.set_exception(StoreError(f"{what} was not tried", cause=reason))
        return call.future

    def _refusal(self) -> str | None:
        if self._closing:
            return "the store was closed"
        if self._hung >= self.policy.max_threads:
            return f"all {self._hung} threads hang in the store"
        if len(self._queue) >= self.policy.queue:
            return f"{len(self._queue)} calls wait already"
        if self.breaker.refuses:
            return LEFT_ALONE
        return None

    def _staff(self) -> None:
        """Start the threads that the queue needs and the limits allow."""
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._watch, name="vericache-store-watcher", daemon=True)
            self._watcher.start()
        healthy = len(self._threads) - self._hung
        if len(self._queue) > self._idle and healthy < self.policy.workers and len(self._threads) < self.policy.max_threads:
            # Daemons: one that hangs for ever must not keep the process from ending.
            thread = threading.Thread(target=self._work, name="vericache-store", daemon=True)
            self._threads.add(thread)
            thread.start()

    def _work(self) -> None:
        while (call := self._next()) is not None:
            self._serve(call)
            with self._changed:
                self._hung -= call.abandoned
            del call  # and with it the blob, while this thread waits for the next

    def _next(self) -> _Call | None:
        """Wait for a call; None when this thread is not needed any more."""
        with self._changed:
            while True:
                if self._closed or len(self._threads) - self._hung > self.policy.workers:
                    self._threads.discard(threading.current_thread())
                    return None
                if not self._queue:
                    self._idle += 1
                    self._clock.wait(self._changed, None)
                    self._idle -= 1
                    continue
                call = self._queue.popleft()
                if not call.settled:
                    call.running = True
                    return call

    def _serve(self, call: _Call) -> None:
        """Try until it works, there is no time for another try, or somebody else has ended the call."""
        error: VeriCacheError | None = None
        for number in range(self.policy.attempts):
            if number and not self._pause(call, number):
                break
            ticket = self.breaker.admit()
            if ticket is None:
                why = str(error) if error else LEFT_ALONE
                self._end(call, StoreError(f"{call.what} was given up", cause=why), "failed" if error else "refused")
                return
            if not self._begin(call, ticket, number):
                return
            try:
                value = call.attempt(call.deadline)
            except StoreFull as full:  # an answer, only not the one hoped for
                self._outcome(call, self.breaker.succeeded)
                self._end(call, full, "failed")
                return
            except StoreError as failure:
                error = failure
            except VeriCacheError as misuse:  # of a key, say: no fault of the store
                self._outcome(call, self.breaker.succeeded)
                self._end(call, misuse, "failed")
                return
            except Exception as bug:  # noqa: BLE001  # whatever a backend or its library raises, callers know one type
                error = StoreError(f"{call.what} failed", cause=f"{type(bug).__name__}: {bug}")
                error.__cause__ = bug
            else:
                self._outcome(call, self.breaker.succeeded)
                self._answer(call, value)
                return
            self._outcome(call, self.breaker.failed)
            if isinstance(error, StoreTimeout):
                break
        if error is not None:
            self._end(call, error, "timed_out" if isinstance(error, StoreTimeout) else "failed")

    def _begin(self, call: _Call, ticket: int, number: int) -> bool:
        """Note that an attempt is under way; False when the call has ended meanwhile."""
        with self._changed:
            if not call.settled:
                call.ticket = ticket
                self._count(retries=min(number, 1))
                return True
        self.breaker.withdrawn(ticket)
        return False

    def _outcome(self, call: _Call, tell: Callable[[int], None]) -> None:
        """Tell the breaker, unless the watcher has told it of a timeout already."""
        with self._changed:
            ticket, call.ticket = call.ticket, None
        if ticket is not None:
            tell(ticket)

    def _pause(self, call: _Call, number: int) -> bool:
        """Wait before attempt ``number`` (from 1); False when the deadline comes first or the call has ended."""
        longest = min(self.policy.backoff_cap, self.policy.backoff * 2 ** (number - 1))
        with self._changed:
            until = self._clock.now() + self._random.uniform(0, longest)
            while until < call.deadline and not call.settled:
                if self._clock.now() >= until:
                    return True
                self._clock.wait(self._changed, until)
        return False

    def _watch(self) -> None:
        """End calls at their deadlines, whatever the threads do."""
        while True:
            with self._changed:
                if self._closed:
                    return
                now = self._clock.now()
                expired = [call for call in self._pending if call.deadline <= now]
                if not expired:
                    self._clock.wait(self._changed, min((call.deadline for call in self._pending), default=None))
            for call in expired:
                self._outcome(call, self.breaker.failed)
                self._end(call, StoreTimeout(f"{call.what} did not end before its deadline"), "timed_out")

    def _answer(self, call: _Call, value: Any) -> None:
        counts = {"answered": 1}
        if call.what == "get":
            counts |= {"misses": 1} if value is None else {"hits": 1, "bytes_read": length_of(value)}
        elif call.what == "put":
            counts["bytes_written"], value = value, None
        if self._settle(call, counts):
            call.future.set_result(value)

    def _end(self, call: _Call, error: VeriCacheError, count: str) -> None:
        if self._settle(call, {count: 1}):
            call.future.set_exception(error)

    def _settle(self, call: _Call, counts: dict[str, int]) -> bool:
        """Take the right to answer a call; False when somebody else did, so that this answer is late."""
        with self._changed:
            if call.settled:
                self._count(late=counts.get("answered", 0))
                return False
            call.settled = True
            self._pending.discard(call)
            if not call.running and call in self._queue:
                self._queue.remove(call)
            if call.running and threading.current_thread() not in self._threads:
                call.abandoned = True
                self._hung += 1
                self._staff()
            self._count(**counts)
            self._changed.notify_all()
            return True

    def _count(self, **more: int) -> None:
        self._counts = replace(self._counts, **{name: getattr(self._counts, name) + n for name, n in more.items()})
