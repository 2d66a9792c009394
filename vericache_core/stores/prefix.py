"""The prefix store: full KV of prompts by chunk, over any blob store; compressed KV beside it.

What a store holds can only save time. A chunk that is missing, late, damaged or somebody else's ends the prefix there,
and the rows behind it are computed as if there were no store.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from vericache_core.cache.full import FullKV
from vericache_core.errors import PayloadError, StoreError, SwapError, VeriCacheError
from vericache_core.kv import LayerDescriptor
from vericache_core.stores.base import KVBlobs, Packed, StoreCounts, Tally, log
from vericache_core.stores.blobs import BlobStore
from vericache_core.stores.chunks import capture, chunk_specs, restore, usable, window_chunks
from vericache_core.stores.compressed import CompressedStore
from vericache_core.stores.format import decode_blob, decode_tensors, encode_tensors, full_header
from vericache_core.stores.identity import PrefixIdentity, chain, full_key, index_key, tail_key
from vericache_core.stores.url import DEFAULT_CHUNK, DEFAULT_TIMEOUT

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


class PrefixStore(KVBlobs):
    """See the module docstring. Safe to use from several threads; a cache is used by one at a time.

    Args:
        blobs: the backend.
        identity: of the rows; rows of another one are out of reach.
        layers: of the model.
        chunk: tokens of a chunk.
        timeout: seconds that a call without a deadline may take.

    Attributes:
        compressed: compressed KV of the same identity.
    """

    def __init__(
        self,
        blobs: BlobStore,
        identity: PrefixIdentity,
        layers: Sequence[LayerDescriptor],
        chunk: int = DEFAULT_CHUNK,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        super().__init__(blobs, identity, layers, timeout, Tally())
        self.chunk = chunk
        self.compressed = CompressedStore(blobs, identity, layers, timeout, self.tally)
        self._sliding = [layer for layer in layers if layer.sliding_window is not None]
        self._others = [layer for layer in layers if layer.sliding_window is None]

    @property
    def counts(self) -> StoreCounts:
        return self.tally.counts

    def of(self, tenant: str) -> PrefixStore:
        """The same backend for another tenant: keys and counters of its own."""
        return PrefixStore(self.blobs, replace(self.identity, tenant=tenant), self.layers, self.chunk, self.timeout)

    def keys(self, token_ids: Sequence[int]) -> list[str]:
        """Keys of the full chunks of ``token_ids``, in order."""
        return [full_key(link) for link in chain(self.identity, token_ids, self.chunk)]

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
            self.tally.add(misses=1)
            return Hit((), 0, reason)
        reason = "all chunks" if count == len(keys) else f"chunk {count} is not stored"
        return Hit(tuple(keys[:count]), count * self.chunk, reason)

    def load(
        self,
        token_ids: Sequence[int],
        full: FullKV,
        *,
        most: int | None = None,
        whole: bool = False,
        deadline: float | None = None,
    ) -> Loaded:
        """Fill an empty cache with the rows of the longest stored prefix of ``token_ids``.

        Args:
            token_ids: the prompt.
            full: an empty cache; holds ``Loaded.tokens`` rows afterwards, bit for bit those of a prefill.
            most: rows at most; one less than there are tokens leaves one to compute, which gives the first logits.
            whole: take its tail too, where one was saved and ``most`` allows it.
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
                loaded = self._load(hit, token_ids if whole and most == len(token_ids) else (), full, most, until, faults)
        except SwapError:
            raise
        except Exception as error:  # noqa: BLE001 (whatever a backend does costs speed, never tokens)
            faults.append(self._fault("the store failed", error))
            loaded = Loaded()
        return replace(loaded, faults=tuple(faults), reason=faults[-1] if faults else loaded.reason)

    def _load(self, hit: Hit, whole: Sequence[int], full: FullKV, most: int, until: float, faults: list[str]) -> Loaded:
        reach = window_chunks(self.layers, self.chunk)
        newest: deque[tuple[int, Mapping[str, memoryview], int | None]] = deque(maxlen=reach)
        count = nbytes = 0
        reason = hit.reason
        for number, tensors, size in self._chunks(hit.keys, until, faults):
            restore(full, self._others, number, self.chunk, tensors)
            newest.append((number, tensors, None))
            count, nbytes = number + 1, nbytes + size
        if not faults and count < len(hit.keys):
            reason = f"chunk {count} was evicted meanwhile"
        tokens = usable(self.layers, min(most, count * self.chunk), self.chunk)
        rest = len(whole) - count * self.chunk
        if 0 < rest < self.chunk and not faults and (tail := self._tail(whole, until, faults)) is not None:
            tensors, size = tail
            restore(full, self._others, count, self.chunk, tensors, rest)
            newest.append((count, tensors, rest))
            count, nbytes, tokens, reason = count + 1, nbytes + size, len(whole), "all of it"
        if tokens:
            last = (tokens - 1) // self.chunk
            for number, tensors, part in newest:
                if number <= last:
                    restore(full, self._sliding, number, self.chunk, tensors, part)
            full.adopt(tokens)
        self.tally.add(chunks_loaded=count, bytes_loaded=nbytes)
        return Loaded(tokens, nbytes, (), reason)

    def _tail(self, token_ids: Sequence[int], until: float, faults: list[str]) -> tuple[Mapping[str, memoryview], int] | None:
        """Tensors and bytes of what ``token_ids`` have behind their last whole chunk, checked."""
        links = chain(self.identity, token_ids, self.chunk)
        rest = token_ids[len(links) * self.chunk :]
        key = tail_key(self.identity, links, self.chunk, rest)
        return self._get(key, len(links), len(rest), until, faults)

    def _chunks(
        self, keys: Sequence[str], until: float, faults: list[str]
    ) -> Iterator[tuple[int, Mapping[str, memoryview], int]]:
        """``(number, tensors, bytes)`` of each chunk, checked, until one is missing or at fault."""
        for number, key in enumerate(keys):
            found = self._get(key, number, None, until, faults)
            if found is None:
                return
            yield number, *found

    def _get(
        self, key: str, number: int, tokens: int | None, until: float, faults: list[str]
    ) -> tuple[Mapping[str, memoryview], int] | None:
        """``(tensors, bytes)`` of chunk ``number``, or of a tail of ``tokens`` there; None if missing or at fault."""
        try:
            found = self.blobs.get(key, deadline=until)
            if found is None:
                return None
            blob = memoryview(found)
            payload = decode_blob(blob, full_header(self.identity, key, number, tokens or self.chunk))
            return decode_tensors(payload, chunk_specs(self.layers, number, self.chunk, tokens)), blob.nbytes
        except PayloadError as error:
            faults.append(self._fault(f"chunk {number}", error))
            self._remove(key, until)
        except Exception as error:  # noqa: BLE001 (as in load)
            faults.append(self._fault(f"chunk {number}", error))
        return None

    def capture(self, token_ids: Sequence[int], full: FullKV, number: int, links: Sequence[bytes] = ()) -> Packed:
        """Copy chunk ``number`` out of ``full``: rows of ``token_ids``, all of them committed.

        Only the copy needs the cache; :meth:`put` may run later, on another thread. ``links`` are those of the chain
        that are known already.

        Raises:
            SwapError: the cache could not be read.
            IndexError: a sliding window has left the chunk behind.
        """
        link = chain(self.identity, token_ids[: (number + 1) * self.chunk], self.chunk, links)[number]
        return self._packed(full_key(link), token_ids, full, number)

    def capture_tail(self, token_ids: Sequence[int], full: FullKV, links: Sequence[bytes] = ()) -> Packed | None:
        """Copy what ``token_ids`` have behind their last whole chunk, None if they end with one; as :meth:`capture`."""
        links = chain(self.identity, token_ids, self.chunk, links)
        rest = token_ids[len(links) * self.chunk :]
        if not rest:
            return None
        return self._packed(tail_key(self.identity, links, self.chunk, rest), token_ids, full, len(links), len(rest))

    def _packed(self, key: str, token_ids: Sequence[int], full: FullKV, number: int, tokens: int | None = None) -> Packed:
        parts = encode_tensors(capture(full, number, self.chunk, tokens))
        note = index_key(self.identity.tenant, token_ids, self.chunk) if number == 0 and tokens is None else None
        return Packed(full_header(self.identity, key, number, tokens or self.chunk), parts, note)

    def save(self, token_ids: Sequence[int], full: FullKV, *, deadline: float | None = None) -> int:
        """Publish every full chunk of ``full``, whose committed rows are those of ``token_ids``; returns how many.

        Windows that have moved on cannot be saved afterwards: with sliding layers capture each chunk when it is full.

        Raises:
            StoreError, SwapError, IndexError: as :meth:`capture` and :meth:`put`.
        """
        until = self._until(deadline)
        keys = self.keys(token_ids[: full.tokens])
        for number, key in enumerate(keys):
            self.put(self._packed(key, token_ids, full, number), deadline=until)
        return len(keys)

    def close(self) -> None:
        """Close the backend; safe to call twice."""
        self.blobs.close()

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
