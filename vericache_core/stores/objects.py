"""Blobs as objects of a store that fsspec knows: S3, Google Cloud Storage, Azure, a folder, memory.

Object stores show an object when its upload is complete, so a single put publishes a blob. Folders do not: there it is
written under another name and renamed. Which of the two holds is known for the file systems listed here; others are
refused, since a reader could see half a blob. A blob is read by one request, so that its bytes are of one upload.
"""

from __future__ import annotations

import asyncio
import errno
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Final
from urllib.parse import SplitResult, urlunsplit

from vericache_core.errors import ConfigError, MissingDependencyError, StoreError, StoreFull, StoreTimeout
from vericache_core.sizes import exact_size
from vericache_core.stores.blobs import BlobStore, Buffer
from vericache_core.stores.client import StoreClient
from vericache_core.stores.guarded import GuardedStore
from vericache_core.stores.keys import check_key
from vericache_core.stores.pieces import length_of

try:
    import fsspec
    from fsspec.asyn import sync
    from fsspec.exceptions import FSTimeoutError
except ImportError as _error:
    raise MissingDependencyError("object storage needs fsspec", hint="pip install 'vericache[objects]'") from _error

PUT_AT_ONCE: Final = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory"})
RENAMED: Final = frozenset({"file", "local", "sftp"})
LARGEST: Final = 4 << 30
"""Bytes of a blob; S3 takes up to 5 GB in one put."""

_NO_ROOM: Final = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class ObjectBlobs:
    """A ``BlobStore`` in a file system of fsspec.

    Deadlines reach asynchronous file systems, those of object stores; a call of another one may last longer, so put a
    ``StoreClient`` before it. Nothing is evicted: give the bucket an expiry rule, and one that ends uploads which were
    never completed.

    Args:
        url: ``s3://bucket/folder``, ``memory://folder``, ``file:///folder``.
        max_bytes: largest blob that is written, and largest that memory is given to when it is read.
        options: of the file system, such as ``endpoint_url`` or ``profile`` of S3.

    Raises:
        MissingDependencyError: the package of this file system is not installed.
        ConfigError: fsspec does not know it, or we do not know how it publishes.
    """

    def __init__(self, url: str, *, max_bytes: int = LARGEST, **options: Any) -> None:
        if "::" in url:  # a cache in front, an archive within: their atomicity is not that of what they wrap
            raise ConfigError("nobody has checked that chained file systems publish a blob at once")
        try:
            # Neither of the two caches: one would answer for other processes, one would share what close closes.
            self._fs, self._root = fsspec.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **options)
        except ImportError as error:
            hint = "pip install 'vericache[objects]'" if url.startswith("s3") else None
            raise MissingDependencyError("this object store needs a package", cause=str(error), hint=hint) from error
        except ValueError as error:
            raise ConfigError("this is no address of an object store", cause=str(error)) from error
        protocol = self._fs.protocol
        protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        self._renames = not protocols & PUT_AT_ONCE
        if self._renames and not protocols & RENAMED:
            raise ConfigError(f"nobody has checked that {min(protocols)} publishes a blob at once")
        self._max_bytes = max_bytes
        self._closed = False

    def get(self, key: str, *, deadline: float) -> memoryview | None:
        path = self._path(key)
        try:
            about = self._call("info", path, deadline=deadline)
            if about.get("type") == "directory":
                return None
            size = about.get("size")
            if not isinstance(size, int) or not 0 <= size <= self._max_bytes:
                raise StoreError(f"the object store says that a blob has {size} bytes", cause=f"limit {self._max_bytes:,}")
            if size == 0:
                return memoryview(b"")  # a range of nothing is an error of S3
            blob = self._call("cat_file", path, start=0, end=size, deadline=deadline)
        except FileNotFoundError:
            return None
        if len(blob) != size:
            raise StoreError("an object has another length than the store said", cause=f"{len(blob)} instead of {size}")
        return memoryview(blob).toreadonly()

    def put(self, key: str, parts: Sequence[Buffer], *, deadline: float) -> None:
        path, size = self._path(key), sum(map(length_of, parts))
        if size > self._max_bytes:
            raise StoreFull(f"a blob of {exact_size(size)} is too large", cause=f"the limit is {exact_size(self._max_bytes)}")
        blob = b"".join(parts)
        try:
            if self._renames:
                self._put_aside(path, blob, deadline)
            else:
                self._call("pipe_file", path, blob, deadline=deadline)
        except FileNotFoundError as error:
            raise StoreError("there is no such bucket or folder", cause=str(error)) from error

    def contains(self, keys: Sequence[str], *, deadline: float) -> list[bool]:
        paths = [self._path(key) for key in keys]
        if self._fs.async_impl and paths:
            return list(self._guard(lambda left: sync(self._fs.loop, _all_exist, self._fs, paths, timeout=left), deadline))
        return [bool(self._call("exists", path, deadline=deadline)) for path in paths]

    def delete(self, key: str, *, deadline: float) -> None:
        with suppress(FileNotFoundError):  # gone already
            self._call("rm_file", self._path(key), deadline=deadline)

    def pinned(self, keys: Sequence[str]) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None:
        self._closed = True
        self._fs = None  # its sessions end with it

    def _path(self, key: str) -> str:
        return f"{self._root.rstrip('/')}/{check_key(key)}"

    def _put_aside(self, path: str, blob: bytes, deadline: float) -> None:
        folder, _, name = path.rpartition("/")
        aside = f"{folder}/.{name}.{secrets.token_hex(8)}"  # no key begins with a dot
        self._call("makedirs", folder, exist_ok=True, deadline=deadline)
        try:
            self._call("pipe_file", aside, blob, deadline=deadline)
            self._call("mv", aside, path, deadline=deadline)
        except BaseException:
            with suppress(FileNotFoundError, StoreError):  # the error that led here is the one to tell
                self._call("rm_file", aside, deadline=time.monotonic() + 1)
            raise

    def _call(self, name: str, *args: Any, deadline: float, **kwargs: Any) -> Any:
        """Call a method of the file system; ``FileNotFoundError`` is the only error that is left as it is."""

        def run(left: float) -> Any:
            if self._fs.async_impl:
                return sync(self._fs.loop, getattr(self._fs, f"_{name}"), *args, timeout=left, **kwargs)
            return getattr(self._fs, name)(*args, **kwargs)

        return self._guard(run, deadline)

    def _guard(self, run: Callable[[float], Any], deadline: float) -> Any:
        if self._closed:
            raise StoreError("the object store was closed")
        left = deadline - time.monotonic()
        if left <= 0:
            raise StoreTimeout("past the deadline")
        try:
            return run(left)
        except FileNotFoundError:
            raise
        except (FSTimeoutError, TimeoutError) as error:
            raise StoreTimeout("the object store did not answer in time") from error
        except Exception as error:  # each file system brings errors of its own libraries
            if isinstance(error, OSError) and error.errno in _NO_ROOM:
                raise StoreFull("the object store has no room for a blob", cause=str(error)) from error
            kind = StoreTimeout if time.monotonic() >= deadline else StoreError
            raise kind("the object store failed", cause=f"{type(error).__name__}: {error}") from error


def from_url(parts: SplitResult, options: Mapping[str, Any]) -> BlobStore:
    """The store of a URL, with options of the file system in its query; its deadlines hold whatever the store does."""
    given = dict(options)
    if "region" in given:
        given["client_kwargs"] = {"region_name": given.pop("region")}
    url = urlunsplit(parts._replace(query="", fragment=""))
    return GuardedStore(StoreClient(ObjectBlobs(url, **given)))


async def _all_exist(fs: Any, paths: Sequence[str]) -> list[bool]:
    return list(await asyncio.gather(*(fs._exists(path) for path in paths)))  # noqa: SLF001  # fsspec's asynchronous API
