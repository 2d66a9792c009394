"""What putting and getting a blob costs in each backend, as a multiple of copying it within memory.

Copies and backends take turns, so that whatever else the machine does meets all of them. Times of one machine say
little about another; ratios to a copy in the same run say more.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from vericache_core.errors import MissingDependencyError, StoreError, UsageError
from vericache_core.stores.blobs import BlobStore
from vericache_core.stores.disk import DiskBlobs
from vericache_core.stores.memory import SharedMemoryBlobs
from vericache_core.stores.url import open_store

MEMCPY: Final = "memcpy"
GOALS: Final = {"redis": ("get", 8.0), "file": ("load", 1.0), "shm": ("load", 1.0)}
"""For a backend the operation that has a goal, and the multiple of a copy that it may cost."""

_PATIENCE: Final = 120.0
"""Seconds that a call may take; a measurement is no place to give up early."""


@dataclass
class Times:
    """Seconds of each repetition.

    Attributes:
        put: publish the blob, under a key of its own each time.
        get: ask for it; a mapped blob has been found then, but no byte of it was read.
        load: ask for it and copy it into a buffer that was there before: every page of a mapping is met for the first time.
        again: copy it once more from where it lies: what a reader pays that keeps what it was given.
    """

    put: list[float] = field(default_factory=list)
    get: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Ratio:
    """Median, least and most of some times, as multiples of the median copy."""

    median: float
    least: float
    most: float


@dataclass
class Transport:
    """A measurement.

    Attributes:
        size: bytes of the blob.
        memcpy: seconds of each copy into memory that nobody has touched yet.
        backends: times of each backend.
        failed: backends that could not be measured, and why.
    """

    size: int
    memcpy: list[float] = field(default_factory=list)
    backends: dict[str, Times] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def ratio(self, seconds: Sequence[float]) -> Ratio:
        """``seconds`` as multiples of a copy."""
        copy = statistics.median(self.memcpy)
        return Ratio(statistics.median(seconds) / copy, min(seconds) / copy, max(seconds) / copy)

    def goal(self, name: str) -> tuple[str, float, bool] | None:
        """The operation of a backend that has a goal, the goal, and whether it is met."""
        if name not in GOALS or name not in self.backends:
            return None
        operation, most = GOALS[name]
        return operation, most, self.ratio(getattr(self.backends[name], operation)).median <= most


def measure(
    stores: Mapping[str, BlobStore], size: int, repeats: int, clock: Callable[[], float] = time.perf_counter
) -> Transport:
    """Take turns: a copy, then put, get, load and again of each backend, ``repeats`` times.

    A backend that fails is named in ``failed``, with its times so far dropped.
    """
    source = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
    buffer = np.zeros(size, np.uint8)
    found = Transport(size, backends={name: Times() for name in stores})
    for number in range(repeats):
        began = clock()
        np.empty(size, np.uint8)[:] = source
        found.memcpy.append(clock() - began)
        for name, store in stores.items():
            if name in found.failed:
                continue
            try:
                _turn(store, f"bench-{os.getpid()}-{number}", source, buffer, found.backends[name], clock)
            except StoreError as error:
                found.failed[name] = str(error)
                del found.backends[name]
    return found


def _turn(store: BlobStore, key: str, source: np.ndarray, buffer: np.ndarray, times: Times, clock: Callable[[], float]) -> None:
    began = clock()
    store.put(key, [source.data], deadline=_deadline())
    times.put.append(clock() - began)
    for load in (False, True):
        began = clock()
        blob = store.get(key, deadline=_deadline())
        if blob is None:
            raise StoreError("a blob was gone right after it was put")
        if load:
            buffer[:] = blob
        (times.load if load else times.get).append(clock() - began)
        if load:
            began = clock()
            buffer[:] = blob
            times.again.append(clock() - began)
        del blob
    if not np.array_equal(buffer, source):
        raise StoreError("a blob came back changed")
    store.delete(key, deadline=_deadline())
    buffer[:] = 0


def _deadline() -> float:
    return time.monotonic() + _PATIENCE


@contextlib.contextmanager
def opened(names: Sequence[str], say: Callable[[str], None]) -> Iterator[dict[str, BlobStore]]:
    """Stores of backends by name, or by URL; each in a place of its own that is removed afterwards.

    Without names: all that are there, and ``say`` is told about the others.

    Raises:
        UsageError: a backend that was asked for is unknown, or not there.
    """
    unknown = [name for name in names if name not in BACKENDS and "://" not in name]
    if unknown:
        raise UsageError(f"unknown backend {unknown[0]!r}", hint=f"{', '.join(BACKENDS)}, or the URL of a store")
    with ExitStack() as stack:
        stores: dict[str, BlobStore] = {}
        for name in names or BACKENDS:
            try:
                if "://" in name:
                    store = open_store(name).blobs
                    stack.callback(store.close)
                else:
                    store = stack.enter_context(BACKENDS[name]())
            except MissingDependencyError as error:
                if names:
                    raise
                say(f"{name} is left out: {error}")
                continue
            stores[name] = store
        yield stores


@contextlib.contextmanager
def _file() -> Iterator[BlobStore]:
    with tempfile.TemporaryDirectory(prefix="vericache-bench-") as folder:
        yield DiskBlobs(Path(folder) / "store")


@contextlib.contextmanager
def _shared_memory() -> Iterator[BlobStore]:
    store = SharedMemoryBlobs(f"bench-{os.getpid()}")
    try:
        yield store
    finally:
        shutil.rmtree(store.folder, ignore_errors=True)  # not there when nothing was put


@contextlib.contextmanager
def _redis() -> Iterator[BlobStore]:
    """A server of its own, on a free port, that keeps nothing on disk."""
    program = shutil.which("redis-server")
    if program is None:
        raise MissingDependencyError(
            "redis-server is not installed", hint="apt-get install redis-server, or name a redis:// URL"
        )
    from vericache_core.stores.redis import RedisBlobs

    with tempfile.TemporaryDirectory(prefix="vericache-bench-") as folder:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", folder]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # noqa: S603  # no shell, words of our own
        store = RedisBlobs(f"redis://127.0.0.1:{port}")
        try:
            _wait_for(store)
            yield store
        finally:
            store.close()
            process.terminate()
            process.wait()


def _wait_for(store: BlobStore) -> None:
    until = _deadline()
    while True:
        try:
            store.contains(["bench"], deadline=until)
            return
        except StoreError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.05)


BACKENDS: Final[dict[str, Callable[[], AbstractContextManager[BlobStore]]]] = {
    "file": _file,
    "shm": _shared_memory,
    "redis": _redis,
}
