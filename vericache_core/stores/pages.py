"""Large pages for files in memory (``/dev/shm``), whatever size the system gives them by itself.

Reading a fresh mapping costs one entry of the page table a page: with pages of 4 KiB nearly as much as copying what is in
them. Linux (6.1 and later) turns 2 MiB of such a file into one page when it is asked to, unless the administrator forbade
it altogether; and a mapping has one entry for it if it begins where a large page may begin. Where there are none, a file has
small pages and is read more slowly.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Final

import numpy as np

LARGE: Final = 2 << 20
"""Bytes of a large page of x86 and of ARM with pages of 4 KiB; elsewhere asking for one fails, or does no harm."""

_COLLAPSE: Final = 25  # MADV_COLLAPSE of linux/mman.h, which the standard library does not name
_FIXED: Final = 0x10  # MAP_FIXED
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


def allot(file: int, size: int, in_time: Callable[[], None]) -> bool:
    """Give an empty file ``size`` bytes, in large pages as far as whole ones fit; it is about to be written.

    Pages that are made beforehand are filled once; joining small ones afterwards would copy everything a second time.

    Args:
        file: open for reading and writing.
        size: of the file, from now on.
        in_time: called before each page, as the system may have to move others for it; raises when it took too long.

    Returns:
        Whether all of them were had; the first that is refused ends it, and the rest gets small pages.

    Raises:
        OSError: no space.
    """
    os.ftruncate(file, size)
    if size < LARGE:
        return True
    pages, skipped = _map(file, size)
    for start in range(0, size - LARGE + 1, LARGE):
        in_time()
        os.pwrite(file, b"\0", start)  # a page that is not there at all cannot be enlarged
        try:
            pages.madvise(_COLLAPSE, skipped + start, LARGE)
        except OSError:
            return False
    return True


def map_aligned(file: int, size: int) -> memoryview:
    """A read-only mapping of a file that begins where a large page may begin; it goes with its last reference.

    Raises:
        OSError: the system refuses it.
    """
    around, skipped = _map(file, size)
    return memoryview(around)[skipped : skipped + size]


def _map(file: int, size: int) -> tuple[mmap.mmap, int]:
    """The mapping within a larger one, and where it begins in that."""
    around = mmap.mmap(-1, size + LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
    address = int(np.frombuffer(around, np.uint8).ctypes.data)
    skipped = -address % LARGE
    # Within addresses that are ours already, so nothing else can be there, and ``around`` gives all of them back.
    flags = mmap.MAP_SHARED | _FIXED
    if _libc.mmap(address + skipped, size, mmap.PROT_READ, flags, file, 0) != address + skipped:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return around, skipped
