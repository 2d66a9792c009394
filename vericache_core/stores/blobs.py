"""What a backend of the prefix store is: immutable blobs by key, and nothing that knows of KV.

A blob is written once under a key that names its content, so a second ``put`` of the same key may be dropped and a
reader can never see two versions. Everything above (keys, formats, checksums, namespaces) is the same for all
backends; everything below (files, shared memory, Redis, object storage) may fail at any time in any way, and is not
trusted: what it returns is checked before it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

Buffer = bytes | bytearray | memoryview


@runtime_checkable
class BlobStore(Protocol):
    """Blobs by key. Safe to use from several threads; ``deadline`` is a point of ``time.monotonic()``.

    Keys are lowercase hexadecimal digests with an optional ``namespace-`` before them: ``[a-z0-9-]{1,128}``, so that they
    are safe as file names, object names and Redis keys alike; anything else is a ``UsageError`` (``keys.check_key``).

    Every method raises ``StoreTimeout`` past its deadline and ``StoreError`` for any other failure; neither leaves
    anything half written that a reader could see.
    """

    def get(self, key: str, *, deadline: float) -> memoryview | None:
        """The whole blob, read-only and valid for as long as it is referenced; None if there is none."""

    def put(self, key: str, parts: Sequence[Buffer], *, deadline: float) -> None:
        """Publish the concatenation of ``parts`` under ``key``: all of it becomes visible, or nothing does.

        Raises ``StoreFull`` when the blob cannot be made to fit.
        """

    def contains(self, keys: Sequence[str], *, deadline: float) -> list[bool]:
        """For each key whether there is a blob; a hint, since it may be evicted before the next call."""

    def delete(self, key: str, *, deadline: float) -> None:
        """Remove the blob, if there is one."""

    def pinned(self, keys: Sequence[str]) -> AbstractContextManager[None]:
        """Blobs that this process must not evict for as long as the context is open."""

    def close(self) -> None:
        """Give back every handle; safe to call twice."""


@runtime_checkable
class Checkable(Protocol):
    """A backend that can tell more about itself than whether it answers a lookup."""

    def check(self, *, deadline: float) -> None:
        """See whether blobs could be put, without putting any and without evicting one for it.

        Raises ``StoreUnusable`` where waiting would not help; else as every method of a ``BlobStore``.
        """
