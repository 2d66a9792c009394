"""Saves blobs behind the engine's back: one thread, a bounded queue, and what does not fit is dropped."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait

from vericache_core.errors import StoreFull
from vericache_core.stores.base import KVBlobs, Packed

log = logging.getLogger("vericache.stores")
MOST_BYTES = 512 << 20
PUT_SECONDS = 30.0
"""A blob that takes longer is given up."""
QUIET_SECONDS = 60.0
"""Failures are warned of at most this often."""


class BackgroundSaver:
    """Puts blobs into stores in the order they come.

    Args:
        most_bytes: of blobs that wait; further ones are dropped.

    Attributes:
        dropped: blobs that found the queue full.
        failed: blobs that the store refused or failed to take.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self.most_bytes = most_bytes
        self.dropped = self.failed = 0
        self._waiting_bytes, self._lock = 0, threading.Lock()
        self._worker: ThreadPoolExecutor | None = None
        self._pending: set[Future[None]] = set()
        self._warned = float("-inf")

    def offer(self, store: KVBlobs, packed: Packed) -> bool:
        """Take ``packed`` to be put into ``store`` some time; False if too much waits already."""
        with self._lock:
            if self._waiting_bytes + packed.nbytes > self.most_bytes:
                self.dropped += 1
                return False
            self._waiting_bytes += packed.nbytes
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, thread_name_prefix="vericache-save")
            future = self._worker.submit(self._put, store, packed)
            self._pending.add(future)
        future.add_done_callback(self._forget)
        return True

    def flush(self, timeout: float) -> bool:
        """Wait until what was offered is saved; False if ``timeout`` seconds were not enough."""
        with self._lock:
            pending = set(self._pending)
        return not wait(pending, timeout).not_done

    def close(self, timeout: float = 10.0) -> None:
        """Save what waits, as far as ``timeout`` seconds go, and stop. A later offer starts anew."""
        self.flush(timeout)
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown(wait=not self._pending, cancel_futures=True)

    def _put(self, store: KVBlobs, packed: Packed) -> None:
        try:
            store.put(packed, deadline=time.monotonic() + PUT_SECONDS)
        except Exception as error:  # noqa: BLE001 (whatever a backend does costs speed, never tokens)
            self.failed += 1
            if time.monotonic() - self._warned >= QUIET_SECONDS:
                self._warned = time.monotonic()
                kind = "full" if isinstance(error, StoreFull) else f"failing: {type(error).__name__}"
                log.warning("prefix store is %s, prefixes are not saved (%s)", kind, error)
        finally:
            with self._lock:
                self._waiting_bytes -= packed.nbytes

    def _forget(self, future: Future[None]) -> None:
        with self._lock:
            self._pending.discard(future)
