"""Blobs in LMCache's storage manager (multi-process mode): its memory tier, and behind that what adapters it is given.

LMCache's objects have a size that must be known before they are read. So a blob is cut into pieces of one size, under
keys that nobody else uses, and published by a small record that is written after them and names them. Pieces that
were evicted from under their record make the blob a miss, and the record is removed.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, unquote

import numpy as np

from vericache_core.errors import ConfigError, MissingDependencyError, StoreError, StoreFull, StoreTimeout
from vericache_core.sizes import exact_size
from vericache_core.stores.blobs import BlobStore, Buffer
from vericache_core.stores.client import StoreClient
from vericache_core.stores.guarded import GuardedStore
from vericache_core.stores.keys import check_key
from vericache_core.stores.pieces import PIECE, TAG_BYTES, check_tag, length_of, pieces_of, ranges, read_tag, tag_of

_HINT: Final = "see docs/store-backends.md for how to install it"
try:
    _installed = version("lmcache")
    import torch
    from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
    from lmcache.v1.distributed.config import parse_args
    from lmcache.v1.distributed.storage_manager import StorageManager
except (PackageNotFoundError, ImportError) as _error:
    raise MissingDependencyError("an LMCache store needs lmcache 0.5", cause=str(_error), hint=_HINT) from _error
if not _installed.startswith("0.5."):
    raise MissingDependencyError(f"lmcache {_installed} is not supported", hint="pip install 'lmcache>=0.5.6,<0.6'")

_NONCE: Final = 16
_RECORD: Final = 64
"""Bytes of a record: tag (whose number is the count of pieces), nonce of their keys, zeros."""
_READ_LOCK_SECONDS: Final = 60
"""After which LMCache frees what a get that timed out had asked for."""


class LMCacheBlobs:
    """A ``BlobStore`` in a storage manager of this process.

    LMCache evicts by its own rules, so a pin here keeps nothing; a blob evicted between a lookup and its load is a miss.
    What an adapter does not delete stays there: ``delete`` says so.

    Args:
        adapters: of the second tier, as LMCache's ``--l2-adapter`` takes them; none for memory only.
        memory_bytes: of the memory tier, allocated at once.
        max_bytes: largest blob that is written, and largest that memory is given to when it is read.

    Raises:
        ConfigError: LMCache does not accept an adapter; or it has a serializer, which may change bytes.
    """

    def __init__(
        self, adapters: Sequence[Mapping[str, Any]] = (), *, memory_bytes: int = 1 << 30, max_bytes: int = 1 << 30
    ) -> None:
        if any("serde" in adapter for adapter in adapters):
            raise ConfigError("an adapter with a serializer may give back other bytes than it was given", hint="drop serde")
        words = ["--l1-size-gb", str(memory_bytes / 2**30), "--no-l1-use-lazy", "--eviction-policy", "LRU"]
        words += ["--l1-read-ttl-seconds", str(_READ_LOCK_SECONDS)]
        for adapter in adapters:
            words += ["--l2-adapter", json.dumps(adapter)]
        try:
            self._manager = StorageManager(parse_args(words))
        except SystemExit as error:  # what argparse does with a value that it does not like
            raise ConfigError("LMCache does not accept these adapters") from error
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError("LMCache does not accept these adapters", cause=str(error)) from error
        self._max_bytes = max_bytes
        self._closed = False

    def get(self, key: str, *, deadline: float) -> memoryview | None:
        record = self._record(key, deadline)
        if record is None:
            return None
        count, size, nonce = record
        blob = np.empty(size, np.uint8).data
        with self._read(_piece_keys(key, nonce, count), PIECE, deadline) as pieces:
            if pieces is None:
                self.delete(key, deadline=deadline)
                return None
            for number, ((_, _, start, end), piece) in enumerate(zip(ranges(size), pieces, strict=True)):
                check_tag(piece[:TAG_BYTES], key, number, size)
                blob[start:end] = piece[TAG_BYTES : TAG_BYTES + end - start]
        return blob.toreadonly()

    def put(self, key: str, parts: Sequence[Buffer], *, deadline: float) -> None:
        size = sum(map(length_of, parts))
        if size > self._max_bytes:
            raise StoreFull(f"a blob of {exact_size(size)} is too large", cause=f"the limit is {exact_size(self._max_bytes)}")
        if self._record(key, deadline) is not None:
            return
        nonce = secrets.token_bytes(_NONCE)
        count = sum(1 for _ in ranges(size))
        self._write(_piece_keys(key, nonce, count), pieces_of(key, parts), PIECE)
        _in_time(deadline)
        record = tag_of(key, count, size) + nonce
        self._write([_record_key(key)], iter([[record.ljust(_RECORD, b"\0")]]), _RECORD)

    def contains(self, keys: Sequence[str], *, deadline: float) -> list[bool]:
        return [self._record(key, deadline) is not None for key in keys]

    def delete(self, key: str, *, deadline: float) -> None:
        record = self._record(key, deadline)
        if record is None:
            return
        count, _, nonce = record
        gone = [_record_key(key), *_piece_keys(key, nonce, count)]
        for _, adapter in self._manager.l2_adapters():  # before the first tier, which is filled from here
            adapter.delete(gone)
        self._manager.delete_l1_keys(gone)
        if self._record(key, deadline) is not None:
            raise StoreError("LMCache keeps a blob that was to be deleted", cause="its adapter does not delete")

    def pinned(self, keys: Sequence[str]) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._manager.close()

    def _record(self, key: str, deadline: float) -> tuple[int, int, bytes] | None:
        """Count of pieces, bytes of the blob and nonce; None when there is no blob."""
        with self._read([_record_key(check_key(key))], _RECORD, deadline) as found:
            if found is None:
                return None
            tag, nonce = bytes(found[0][:TAG_BYTES]), bytes(found[0][TAG_BYTES : TAG_BYTES + _NONCE])
        count, size = read_tag(tag, key)
        if size > self._max_bytes or count != sum(1 for _ in ranges(size)):
            raise StoreError(f"LMCache holds a record of {size:,} bytes in {count} pieces, which is none of ours")
        return count, size, nonce

    @contextmanager
    def _read(self, keys: list[Any], each: int, deadline: float) -> Iterator[list[memoryview] | None]:
        """The objects of ``keys``, valid inside; None unless all are there."""
        if self._closed:
            raise StoreError("the LMCache store was closed")
        left = _in_time(deadline)
        handle = self._manager.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(keys, 0, _layout(each))]))
        if not self._manager.wait_prefetch_status(handle, left):
            raise StoreTimeout("LMCache did not find a blob in time")
        result = self._manager.query_prefetch_status(handle)
        if result is None:
            raise StoreError("LMCache lost a request")
        held = [key for number, key in enumerate(keys) if result.hit_cells[0].test(number)]
        try:
            if len(held) < len(keys):
                yield None
                return
            with self._manager.read_prefetched_results(keys, result.l1_owners) as objects:
                views = [memoryview(found.byte_array).cast("B")[:each] for found in objects or ()]
                yield views if len(views) == len(keys) else None
                del views
        finally:
            if held:
                self._manager.finish_read_prefetched(held, 1, result.l1_owners)

    def _write(self, keys: list[Any], pieces: Iterator[list[Buffer]], each: int) -> None:
        reserved = self._manager.reserve_write(keys, _layout(each))
        try:
            if len(reserved) < len(keys):
                raise StoreFull("LMCache has no memory for a blob, or somebody else writes it")
            for key, piece in zip(keys, pieces, strict=True):
                view, at = memoryview(reserved[key].byte_array).cast("B")[:each], 0
                for part in piece:
                    view[at : at + len(part)] = part
                    at += len(part)
                view[at:] = bytes(each - at)
        finally:
            # There is no way to give a reservation back; what is not complete has no record, and is evicted in time.
            self._manager.finish_write(list(reserved))


def from_url(parts: SplitResult, options: Mapping[str, Any]) -> BlobStore:
    """``lmcache:///folder/adapters.json?bytes=2GB``: a file with a JSON list of adapters, and bytes of memory."""
    try:
        adapters = json.loads(Path(unquote(parts.path)).read_text(encoding="utf-8")) if parts.path.strip("/") else []
    except (OSError, ValueError) as error:
        raise ConfigError("the adapters of an LMCache store cannot be read", cause=str(error)) from error
    if not isinstance(adapters, list) or not all(isinstance(adapter, dict) for adapter in adapters):
        raise ConfigError(f"{unquote(parts.path)} holds no JSON list of adapters")
    memory = options.get("bytes")
    return GuardedStore(StoreClient(LMCacheBlobs(adapters, **({} if memory is None else {"memory_bytes": memory}))))


def _layout(each: int) -> Any:
    return MemoryLayoutDesc([torch.Size([each])], [torch.uint8])


def _record_key(key: str) -> Any:
    return ObjectKey(chunk_hash=hashlib.sha256(b"record " + key.encode()).digest(), model_name="vericache-blobs", kv_rank=0)


def _piece_keys(key: str, nonce: bytes, count: int) -> list[Any]:
    names = (b"piece %d of " % number + nonce + key.encode() for number in range(count))
    digests = [hashlib.sha256(name).digest() for name in names]
    return [ObjectKey(chunk_hash=digest, model_name="vericache-blobs", kv_rank=0) for digest in digests]


def _in_time(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise StoreTimeout("past the deadline")
    return left
