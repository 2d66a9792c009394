"""The prefix store: full KV of prompts by chunk, compressed KV by prompt, over any blob store.

What a store holds can only save time. A chunk that is missing, late, damaged or somebody else's ends the prefix there,
and the rows behind it are computed as if there were no store.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vericache_core.cache.full import FullKV
from vericache_core.errors import PayloadError, StoreError, SwapError, VeriCacheError
from vericache_core.kv import CompressedKV, LayerDescriptor
from vericache_core.stores.blobs import BlobStore, Buffer
from vericache_core.stores.chunks import capture, chunk_specs, restore, usable, window_chunks
from vericache_core.stores.format import (
    compressed_header,
    decode_blob,
    decode_tensors,
    encode_blob,
    encode_tensors,
    full_header,
)
from vericache_core.stores.identity import PrefixIdentity, canonical, chain, compressed_key, full_key, index_key
from vericache_core.stores.url import DEFAULT_CHUNK, DEFAULT_TIMEOUT

log = logging.getLogger("vericache.stores")
_MAX_NOTE = 1 << 16


@dataclass(frozen=True)
class Hit:
    """What a store said it has: the keys of the first chunks in a row, and why there are no more."""

    keys: tuple[str, ...]
    tokens: int
    reason: str


@dataclass(frozen=True)
class Loaded:
    """What came of a load.

    Attributes:
        tokens: rows that the cache holds now.
        bytes: of the blobs they came in.
        faults: what went wrong, if anything did; a chunk that is simply not there is no fault.
        reason: why there are no more.
    """

    tokens: int = 0
    bytes: int = 0
    faults: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Chunk:
    """Copies of one chunk's rows on their way into the store; independent of the cache they come from."""

    key: str
    number: int
    parts: Sequence[Buffer]
    index: str
    """Key of the note that says who stored the first chunk."""

    @property
    def nbytes(self) -> int:
        return sum(memoryview(part).nbytes for part in self.parts)


@dataclass(frozen=True)
class StoreCounts:
    """Totals: chunks found and loaded, misses (prompts with no chunk stored), faults, bytes either way."""

    chunks_loaded: int = 0
    chunks_saved: int = 0
    misses: int = 0
    faults: int = 0
    bytes_loaded: int = 0
    bytes_saved: int = 0


class PrefixStore:
    """See the module docstring. Safe to use from several threads; a cache is used by one at a time.

    Args:
        blobs: the backend.
        identity: of the rows; rows of another one are out of reach.
        layers: of the model.
        chunk: tokens of a chunk.
        timeout: seconds that a call without a deadline may take.
    """

    def __init__(
        self,
        blobs: BlobStore,
        identity: PrefixIdentity,
        layers: Sequence[LayerDescriptor],
        chunk: int = DEFAULT_CHUNK,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        self.blobs, self.identity, self.layers = blobs, identity, tuple(layers)
        self.chunk, self.timeout = chunk, timeout
        self._sliding = [layer for layer in layers if layer.sliding_window is not None]
        self._others = [layer for layer in layers if layer.sliding_window is None]
        self._counts, self._lock = StoreCounts(), threading.Lock()

    @property
    def counts(self) -> StoreCounts:
        with self._lock:
            return self._counts

    def keys(self, token_ids: Sequence[int]) -> list[str]:
        """Keys of the full chunks of ``token_ids``, in order."""
        return [full_key(link) for link in chain(self.identity, token_ids, self.chunk)]

    # -- full KV -------------------------------------------------------------------------------------

    def lookup(self, token_ids: Sequence[int], *, deadline: float | None = None) -> Hit:
        """The longest run of first chunks that the store says it has: a hint, since any may be gone a moment later.

        Raises:
            StoreError: the store failed, or took too long.
        """
        keys = self.keys(token_ids)
        if not keys:
            return Hit((), 0, f"{len(token_ids)} tokens are no full chunk of {self.chunk}")
        until = self._until(deadline)
        index = index_key(self.identity.tenant, token_ids, self.chunk)
        there = [bool(found) for found in self.blobs.contains([*keys, index], deadline=until)]
        if len(there) != len(keys) + 1:
            raise StoreError(f"the store answered for {len(there)} keys, not {len(keys) + 1}")
        count = there.index(False) if False in there[:-1] else len(keys)
        if count == 0:
            reason = self._why_not(index, until) if there[-1] else "nothing is stored for these tokens and this tenant"
            log.info("prefix of %d tokens: %s", len(token_ids), reason)
            self._count(misses=1)
            return Hit((), 0, reason)
        reason = "all chunks" if count == len(keys) else f"chunk {count} is not stored"
        return Hit(tuple(keys[:count]), count * self.chunk, reason)

    def load(self, token_ids: Sequence[int], full: FullKV, *, most: int | None = None, deadline: float | None = None) -> Loaded:
        """Fill an empty cache with the rows of the longest stored prefix of ``token_ids``.

        Args:
            token_ids: the prompt.
            full: an empty cache; holds ``Loaded.tokens`` rows afterwards, bit for bit those of a prefill.
            most: rows at most; one less than there are tokens leaves one to compute, which gives the first logits.
            deadline: of ``time.monotonic()``; what has come by then counts.

        Raises:
            SwapError: the cache could not take the rows. Faults of the store are no errors but ``Loaded.faults``.
        """
        most = len(token_ids) if most is None else most
        until = self._until(deadline)
        faults: list[str] = []
        try:
            hit = self.lookup(token_ids[: -(-most // self.chunk) * self.chunk], deadline=until)
            with self.blobs.pinned(hit.keys):
                loaded = self._load(hit, full, most, until, faults)
        except SwapError:
            raise
        except Exception as error:  # noqa: BLE001 (whatever a backend does costs speed, never tokens)
            self._fault(faults, "the store failed", error)
            loaded = Loaded()
        return replace(loaded, faults=tuple(faults), reason=faults[-1] if faults else loaded.reason)

    def _load(self, hit: Hit, full: FullKV, most: int, until: float, faults: list[str]) -> Loaded:
        reach = window_chunks(self.layers, self.chunk)
        newest: deque[tuple[int, Mapping[str, memoryview]]] = deque(maxlen=reach)
        count = nbytes = 0
        reason = hit.reason
        for number, tensors, size in self._chunks(hit.keys, until, faults):
            restore(full, self._others, number, self.chunk, tensors)
            newest.append((number, tensors))
            count, nbytes = number + 1, nbytes + size
        if not faults and count < len(hit.keys):
            reason = f"chunk {count} was evicted meanwhile"
        tokens = usable(self.layers, min(most, count * self.chunk), self.chunk)
        if tokens:
            last = (tokens - 1) // self.chunk
            for number, tensors in newest:
                if number <= last:
                    restore(full, self._sliding, number, self.chunk, tensors)
            full.adopt(tokens)
        self._count(chunks_loaded=count, bytes_loaded=nbytes)
        return Loaded(tokens, nbytes, (), reason)

    def _chunks(
        self, keys: Sequence[str], until: float, faults: list[str]
    ) -> Iterator[tuple[int, Mapping[str, memoryview], int]]:
        """``(number, tensors, bytes)`` of each chunk, checked, until one is missing or at fault."""
        for number, key in enumerate(keys):
            try:
                found = self.blobs.get(key, deadline=until)
                if found is None:
                    return
                blob = memoryview(found)
                payload = decode_blob(blob, full_header(self.identity, key, number, self.chunk))
                tensors = decode_tensors(payload, chunk_specs(self.layers, number, self.chunk))
            except PayloadError as error:
                self._fault(faults, f"chunk {number}", error)
                self._remove(key, until)
                return
            except Exception as error:  # noqa: BLE001 (as in load)
                self._fault(faults, f"chunk {number}", error)
                return
            yield number, tensors, blob.nbytes

    def capture(self, token_ids: Sequence[int], full: FullKV, number: int, links: Sequence[bytes] = ()) -> Chunk:
        """Copy chunk ``number`` out of ``full``: rows of ``token_ids``, all of them committed.

        Only the copy needs the cache; :meth:`put` may run later, on another thread. ``links`` are those of the chain
        that are known already.

        Raises:
            SwapError: the cache could not be read.
            IndexError: a sliding window has left the chunk behind.
        """
        link = chain(self.identity, token_ids[: (number + 1) * self.chunk], self.chunk, links)[number]
        return self._chunk(full_key(link), token_ids, full, number)

    def _chunk(self, key: str, token_ids: Sequence[int], full: FullKV, number: int) -> Chunk:
        tensors = capture(full, number, self.chunk)
        return Chunk(key, number, encode_tensors(tensors), index_key(self.identity.tenant, token_ids, self.chunk))

    def put(self, chunk: Chunk, *, deadline: float | None = None) -> None:
        """Publish a captured chunk.

        Raises:
            StoreError: the store failed; nothing is visible.
        """
        until = self._until(deadline)
        blob = encode_blob(full_header(self.identity, chunk.key, chunk.number, self.chunk), chunk.parts)
        self.blobs.put(chunk.key, blob, deadline=until)
        if chunk.number == 0:
            self.blobs.put(chunk.index, [canonical(self.identity.public()).encode()], deadline=until)
        self._count(chunks_saved=1, bytes_saved=chunk.nbytes)

    def save(self, token_ids: Sequence[int], full: FullKV, *, deadline: float | None = None) -> int:
        """Publish every full chunk of ``full``, whose committed rows are those of ``token_ids``; returns how many.

        Windows that have moved on cannot be saved afterwards: with sliding layers capture each chunk when it is full.

        Raises:
            StoreError, SwapError, IndexError: as :meth:`capture` and :meth:`put`.
        """
        until = self._until(deadline)
        keys = self.keys(token_ids[: full.tokens])
        for number, key in enumerate(keys):
            self.put(self._chunk(key, token_ids, full, number), deadline=until)
        return len(keys)

    # -- compressed KV -------------------------------------------------------------------------------

    def save_compressed(
        self,
        token_ids: Sequence[int],
        compressed: CompressedKV,
        *,
        seed: int = 0,
        protected: Sequence[tuple[int, int]] = (),
        deadline: float | None = None,
    ) -> str:
        """Publish the compressed KV of exactly ``token_ids``; returns its key.

        Args:
            token_ids: what it stands for, ``compressed.tokens`` of them.
            compressed: names its compressor and options, which are part of the key.
            seed: of the context it was compressed in.
            protected: spans of that context.
            deadline: of ``time.monotonic()``.

        Raises:
            StoreError: the store failed; nothing is visible.
        """
        if compressed.tokens != len(token_ids):
            raise PayloadError(f"compressed KV of {compressed.tokens} tokens cannot stand for {len(token_ids)}")
        name, options = compressed.compressor, compressed.options
        key = compressed_key(self.identity, token_ids, name, options, seed=seed, protected=protected)
        header = compressed_header(self.identity, key, len(token_ids), name, options)
        self.blobs.put(key, encode_blob(header, [compressed.to_payload()]), deadline=self._until(deadline))
        return key

    def load_compressed(
        self,
        token_ids: Sequence[int],
        compressor: str,
        options: Mapping[str, Any],
        *,
        seed: int = 0,
        protected: Sequence[tuple[int, int]] = (),
        deadline: float | None = None,
    ) -> CompressedKV | None:
        """The compressed KV of exactly ``token_ids``, or None where it is not stored.

        ``options`` are those of ``CompressedKV.options``: all of them, defaults included.

        Raises:
            StoreError: the store failed or took too long.
            PayloadError: the blob is damaged or not what it should be; it is removed.
        """
        until = self._until(deadline)
        key = compressed_key(self.identity, token_ids, compressor, options, seed=seed, protected=protected)
        found = self.blobs.get(key, deadline=until)
        if found is None:
            return None
        try:
            header = compressed_header(self.identity, key, len(token_ids), compressor, options)
            restored = CompressedKV.from_payload(bytes(decode_blob(memoryview(found), header)))
            if (restored.compressor, restored.tokens, restored.descriptors) != (compressor, len(token_ids), self.layers):
                raise PayloadError("compressed KV is of another compressor, length or model")  # noqa: TRY301
        except PayloadError:
            self._remove(key, until)
            raise
        return restored

    # -- inside --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the backend; safe to call twice."""
        self.blobs.close()

    def _until(self, deadline: float | None) -> float:
        return time.monotonic() + self.timeout if deadline is None else deadline

    def _why_not(self, index: str, until: float) -> str:
        """What differs from the identity under which these tokens are stored. Only for people: nothing depends on it."""
        try:
            note = self.blobs.get(index, deadline=until)
            known = json.loads(bytes(note or b"")[:_MAX_NOTE])
            ours = self.identity.public()
            differing = sorted(name for name in ours if known.get(name) != ours[name])
        except (VeriCacheError, ValueError, AttributeError, RecursionError) as error:
            return f"not stored; the note about these tokens cannot be read ({type(error).__name__})"
        if not differing:
            return "not stored any more: it was evicted, or removed as damaged"
        return f"these tokens are stored, but with other {', '.join(differing)}"

    def _fault(self, faults: list[str], where: str, error: Exception) -> None:
        faults.append(f"{where}: {error if isinstance(error, VeriCacheError) else f'{type(error).__name__}: {error}'}")
        log.warning("prefix store: %s", faults[-1])
        self._count(faults=1)

    def _remove(self, key: str, until: float) -> None:
        """Remove a damaged blob, so that a good one can take its place."""
        try:
            self.blobs.delete(key, deadline=until)
        except Exception as error:  # noqa: BLE001 (as in load)
            log.warning("prefix store: a damaged blob could not be removed (%s)", error)

    def _count(self, **more: int) -> None:
        with self._lock:
            self._counts = replace(self._counts, **{name: getattr(self._counts, name) + n for name, n in more.items()})
