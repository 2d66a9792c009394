"""Prefixes that a store keeps ready: full KV to verify with and compressed KV to send, least recently used out first."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vericache_core.cache.full import FullKV
from vericache_core.index_map import HeadMap
from vericache_core.remote.frames import ids_to_bytes
from vericache_core.remote.layers import Blob


@dataclass(eq=False)
class Prefix:
    """A prefix of one tenant.

    Attributes:
        key: digest of tenant, token ids, compressor and options.
        ids_key: the same without a compressor: whose full KV it is.
        full: its full KV on the device; nobody writes to it any more.
        blobs: compressed KV by layer; empty where no compressor was asked for.
        maps: surviving positions of layers whose rows the drafter holds exactly.
        users: sessions that lean on it.
    """

    key: str
    ids_key: str
    tokens: int
    full: FullKV
    blobs: Sequence[Blob]
    maps: Mapping[int, HeadMap]
    users: int = 0
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = self.full.device_bytes + sum(len(blob.data) for blob in self.blobs)


def prefix_key(tenant: str, ids: Sequence[int], compressor: str | None, options: Mapping[str, Any]) -> str:
    """Name of a prefix; it tells nothing of another tenant's, even for the same tokens."""
    head = json.dumps([tenant, compressor, options], sort_keys=True).encode()
    return hashlib.sha256(len(head).to_bytes(8, "little") + head + ids_to_bytes(ids)).hexdigest()


class Shelf:
    """Prefixes by key, within ``most_bytes`` for those that nobody uses."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._held: OrderedDict[str, Prefix] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Bytes of all prefixes."""
        return sum(prefix.nbytes for prefix in self._held.values())

    def get(self, key: str) -> Prefix | None:
        """Return the prefix, now the most recently used one."""
        found = self._held.get(key)
        if found is not None:
            self._held.move_to_end(key)
        return found

    def with_full(self, ids_key: str) -> Prefix | None:
        """Any prefix of these tokens, whatever its compressed KV."""
        found = next((prefix for prefix in self._held.values() if prefix.ids_key == ids_key), None)
        return None if found is None else self.get(found.key)

    def put(self, prefix: Prefix) -> None:
        """Keep a prefix."""
        self._held[prefix.key] = prefix
        self.trim()

    def trim(self) -> None:
        """Let unused prefixes go, the least recently used first, until the rest fits; the newest stays."""
        for key in list(self._held)[:-1]:
            if self.nbytes <= self._most:
                return
            if not self._held[key].users:
                self._held.pop(key).full.close()

    def clear(self) -> None:
        """Let all of them go."""
        for prefix in self._held.values():
            prefix.full.close()
        self._held.clear()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if a count has gone wrong."""
        for key, prefix in self._held.items():
            assert prefix.key == key
            assert prefix.users >= 0
