"""Blobs in shared memory: files of ``/dev/shm``, with the guarantees of the disk but for surviving a reboot."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import SplitResult

from vericache_core.errors import ConfigError
from vericache_core.stores import pages
from vericache_core.stores.disk import DiskBlobs

ROOT = Path("/dev/shm")  # noqa: S108 (a folder of our own is made in it, and refused if it is not ours)
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class SharedMemoryBlobs(DiskBlobs):
    """Blobs that processes of one user on one machine share by ``name``.

    They stay until the machine restarts or somebody removes ``/dev/shm/vericache-<user>-<name>``, so give a budget. What
    ``get`` returns is the shared memory itself, uncopied: it stays what it is, whoever evicts the blob meanwhile, and the
    memory is given back with the last reader.

    Attributes:
        large_pages: whether the blob written last lies in large pages, as far as whole ones fit (see
            :mod:`vericache_core.stores.pages`); None before the first.

    Raises:
        ConfigError: ``name`` is no plain name.
    """

    def __init__(self, name: str, most_bytes: int | None = None) -> None:
        if not _NAME.fullmatch(name) or name in {".", ".."}:
            raise ConfigError(f"{name!r} is no name for shared memory", hint="letters, digits, '.', '_' and '-'")
        super().__init__(ROOT / f"vericache-{os.getuid()}-{name}", most_bytes, durable=False, private=True)
        self.large_pages: bool | None = None

    def _map(self, file: int, size: int) -> memoryview:
        return pages.map_aligned(file, size)

    def _allot(self, file: int, size: int, in_time: Callable[[], None]) -> None:
        self.large_pages = pages.allot(file, size, in_time)


def from_url(url: SplitResult, options: Mapping[str, str | int | None]) -> SharedMemoryBlobs:
    """``shm://name?bytes=2GB``; see :mod:`vericache_core.stores.url`."""
    if url.path.strip("/"):
        raise ConfigError("shared memory is named by one word", hint="shm://vericache?bytes=2GB")
    most = options.get("bytes")
    assert most is None or isinstance(most, int)
    return SharedMemoryBlobs(url.netloc, most)
