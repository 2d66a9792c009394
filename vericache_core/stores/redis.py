"""Blobs in Redis: one value a blob, set at once and read in pieces.

Reading 1 MiB at a time, a few pieces ahead, takes less than half the time of one large reply: Redis reuses memory that
is warm, and works on the next piece while this one is copied. WATCH tells whether all were pieces of the same value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final
from urllib.parse import SplitResult, urlencode, urlunsplit

import numpy as np

from vericache_core.errors import StoreError, StoreFull
from vericache_core.sizes import exact_size
from vericache_core.stores.blobs import BlobStore, Buffer
from vericache_core.stores.client import StoreClient
from vericache_core.stores.guarded import GuardedStore
from vericache_core.stores.keys import check_key
from vericache_core.stores.pieces import TAG_BYTES, blob_size, check_tag, cut, length_of, ranges
from vericache_core.stores.resp import Connections, RedisRefusal, Talk

LARGEST: Final = 511 << 20
"""Bytes of a blob; with its tags it stays below the 512 MiB that a value in Redis may have."""

_AHEAD: Final = 4
"""Pieces that are asked for before they are read."""


class RedisBlobs:
    """A ``BlobStore`` in a Redis server.

    Redis evicts by its own rules (``maxmemory-policy``), so a pin here keeps nothing; a blob evicted between a lookup
    and its load is a miss.

    Args:
        url: ``redis://[[user]:password@]host:port/db``, ``rediss://`` for TLS, or ``unix://path``.
        prefix: what the names of all keys in Redis begin with.
        max_bytes: largest blob that is written, and largest that memory is given to when it is read.
        options: more arguments of redis-py's connection, such as ``ssl_ca_certs`` or ``credential_provider``.
    """

    def __init__(self, url: str, *, prefix: str = "vericache:", max_bytes: int = LARGEST, **options: Any) -> None:
        self._prefix = prefix.encode()
        self._max_bytes = max_bytes
        self._connections = Connections(url, options)

    def get(self, key: str, *, deadline: float) -> memoryview | None:
        name = self._name(key)
        with self._connections.talk(deadline) as talk:
            talk.send([b"STRLEN", name])
            stored = talk.integer()
            if stored == 0:
                return None
            size = blob_size(stored)
            if not 0 <= size <= self._max_bytes:
                raise StoreError(f"Redis holds {stored:,} bytes there, which is no blob of ours")
            # Not one buffer for all: a reply that comes too late must not land in memory that was given away.
            blob = np.empty(size, np.uint8).data
            talk.send([b"WATCH", name])
            talk.status()
            _read_pieces(talk, key, name, blob)
            talk.send([b"MULTI"], [b"EXEC"])
            talk.status()
            if talk.array() != 0:
                raise StoreError("a blob was replaced or evicted while it was read")
        return blob.toreadonly()

    def put(self, key: str, parts: Sequence[Buffer], *, deadline: float) -> None:
        size = sum(map(length_of, parts))
        if size > self._max_bytes:
            raise StoreFull(
                f"a blob of {exact_size(size)} is too large for Redis", cause=f"the limit is {exact_size(self._max_bytes)}"
            )
        with self._connections.talk(deadline) as talk:
            talk.send_long([b"SET", self._name(key)], cut(key, parts))
            try:
                talk.status()
            except RedisRefusal as refusal:
                if (refusal.cause or "").startswith("OOM"):
                    raise StoreFull("Redis has no memory left for a blob", cause=refusal.cause) from refusal
                raise

    def contains(self, keys: Sequence[str], *, deadline: float) -> list[bool]:
        if not keys:
            return []
        names = [self._name(key) for key in keys]
        with self._connections.talk(deadline) as talk:
            talk.send(*([b"EXISTS", name] for name in names))
            return [talk.integer() == 1 for _ in names]

    def delete(self, key: str, *, deadline: float) -> None:
        with self._connections.talk(deadline) as talk:
            talk.send([b"UNLINK", self._name(key)])
            talk.integer()

    def pinned(self, keys: Sequence[str]) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        self._connections.close()

    def _name(self, key: str) -> bytes:
        return self._prefix + check_key(key).encode()


def _read_pieces(talk: Talk, key: str, name: bytes, blob: memoryview) -> None:
    """Fill ``blob``; a few pieces are asked for ahead of the one that is read."""
    bounds = list(ranges(len(blob)))
    commands = [[b"GETRANGE", name, b"%d" % first, b"%d" % last] for first, last, _, _ in bounds]
    tag = memoryview(bytearray(TAG_BYTES))
    talk.send(*commands[:_AHEAD])
    for number, (_, _, start, end) in enumerate(bounds):
        got, expected = talk.size(), TAG_BYTES + end - start
        if got != expected:
            raise StoreError("a reply of Redis has the wrong length", cause=f"{got} bytes instead of {expected}")
        talk.read_into(tag)
        check_tag(tag, key, number, len(blob))
        talk.read_into(blob[start:end])
        talk.end_of_bulk()
        talk.send(*commands[number + _AHEAD : number + _AHEAD + 1])


def from_url(parts: SplitResult, options: Mapping[str, Any]) -> BlobStore:
    """The store of a URL, with ``prefix`` and redis-py's TLS options in its query; its deadlines hold whatever Redis does."""
    own = dict(options)
    prefix = own.pop("prefix", "vericache:")
    url = urlunsplit(parts._replace(query=urlencode(own), fragment=""))
    return GuardedStore(StoreClient(RedisBlobs(url, prefix=prefix)))
