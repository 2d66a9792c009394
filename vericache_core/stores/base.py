"""What full and compressed KV in a store have in common: blobs that are ready to go, deadlines, counters, faults."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vericache_core.errors import VeriCacheError
from vericache_core.kv import LayerDescriptor
from vericache_core.stores.blobs import BlobStore, Buffer
from vericache_core.stores.format import BlobHeader, encode_blob
from vericache_core.stores.identity import PrefixIdentity, canonical

log = logging.getLogger("vericache.stores")


@dataclass(frozen=True)
class Packed:
    """A blob on its way into the store; independent of the cache that it comes from.

    Attributes:
        note: key of the note that says who stored the first chunk of a prompt; only that chunk has one.
    """

    header: BlobHeader
    parts: Sequence[Buffer]
    note: str | None = None

    @property
    def key(self) -> str:
        return self.header.key

    @property
    def nbytes(self) -> int:
        return sum(memoryview(part).nbytes for part in self.parts)


@dataclass(frozen=True)
class StoreCounts:
    """Totals of one tenant.

    Attributes:
        chunks_loaded, chunks_saved: of full KV, with what is left of a prefix behind its last whole chunk.
        misses: prompts with no chunk stored.
        compressed_loaded, compressed_saved, compressed_misses: of compressed KV, one for a prefix.
        faults: of either kind.
        bytes_loaded, bytes_saved: of either kind.
    """

    chunks_loaded: int = 0
    chunks_saved: int = 0
    misses: int = 0
    compressed_loaded: int = 0
    compressed_saved: int = 0
    compressed_misses: int = 0
    faults: int = 0
    bytes_loaded: int = 0
    bytes_saved: int = 0


class Tally:
    """``StoreCounts`` that several threads add to."""

    def __init__(self) -> None:
        self._counts, self._lock = StoreCounts(), threading.Lock()

    @property
    def counts(self) -> StoreCounts:
        """A consistent snapshot."""
        with self._lock:
            return self._counts

    def add(self, **more: int) -> None:
        """Add to the fields that are named."""
        with self._lock:
            self._counts = replace(self._counts, **{name: getattr(self._counts, name) + n for name, n in more.items()})


class KVBlobs:
    """KV of one identity in a blob store. Safe to use from several threads.

    Args:
        blobs: the backend.
        identity: of the rows; rows of another one are out of reach.
        layers: of the model.
        timeout: seconds that a call without a deadline may take.
        tally: counts what happens.
    """

    def __init__(
        self, blobs: BlobStore, identity: PrefixIdentity, layers: Sequence[LayerDescriptor], timeout: float, tally: Tally
    ) -> None:
        self.blobs, self.identity, self.layers, self.timeout = blobs, identity, tuple(layers), timeout
        self.tally = tally

    def put(self, packed: Packed, *, deadline: float | None = None) -> None:
        """Publish a blob.

        Raises:
            StoreError: the store failed; nothing is visible.
        """
        until = self._until(deadline)
        self.blobs.put(packed.key, encode_blob(packed.header, packed.parts), deadline=until)
        if packed.note is not None:
            self.blobs.put(packed.note, [canonical(self.identity.public()).encode()], deadline=until)
        kind = "chunks_saved" if packed.header.role == "full" else "compressed_saved"
        self.tally.add(**{kind: 1, "bytes_saved": packed.nbytes})

    def _until(self, deadline: float | None) -> float:
        return time.monotonic() + self.timeout if deadline is None else deadline

    def _fault(self, where: str, error: Exception) -> str:
        """Note that something went wrong; returns it in words."""
        text = f"{where}: {error if isinstance(error, VeriCacheError) else f'{type(error).__name__}: {error}'}"
        log.warning("prefix store: %s", text)
        self.tally.add(faults=1)
        return text

    def _remove(self, key: str, until: float) -> None:
        """Remove a damaged blob, so that a good one can take its place."""
        try:
            self.blobs.delete(key, deadline=until)
        except Exception as error:  # noqa: BLE001 (whatever a backend does costs speed, never tokens)
            log.warning("prefix store: a damaged blob could not be removed (%s)", error)
