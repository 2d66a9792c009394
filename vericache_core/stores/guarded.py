"""A store that never keeps its caller waiting past a deadline, whatever the backend below does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from vericache_core.stores.blobs import Buffer
from vericache_core.stores.client import StoreClient


class GuardedStore:
    """A ``BlobStore`` whose calls go through a ``StoreClient``: retries, circuit breaker, and deadlines that hold."""

    def __init__(self, client: StoreClient) -> None:
        self.client = client

    def get(self, key: str, *, deadline: float) -> memoryview | None:
        return self.client.get(key, deadline=deadline).result()

    def put(self, key: str, parts: Sequence[Buffer], *, deadline: float) -> None:
        self.client.put(key, parts, deadline=deadline).result()

    def contains(self, keys: Sequence[str], *, deadline: float) -> list[bool]:
        return self.client.contains(keys, deadline=deadline).result()

    def delete(self, key: str, *, deadline: float) -> None:
        self.client.delete(key, deadline=deadline).result()

    def pinned(self, keys: Sequence[str]) -> AbstractContextManager[None]:
        return self.client.pinned(keys)

    def close(self) -> None:
        self.client.close()
