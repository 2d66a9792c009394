"""Where offloaded full KV rests: host memory, or a file that has no name.

A store holds pages in the layout of :class:`PagedRows`, so that a swap is a plain copy. Anything that
goes wrong is a ``SwapError``; a row is never half read.
"""

from __future__ import annotations

import os
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vericache_core.cache.link import STOPPED, Link
from vericache_core.cache.move import Index, copy_heads, copy_rows
from vericache_core.cache.pages import PAGE, Extent, PagedRows, by_page, fill_page, pages_for
from vericache_core.errors import SwapError
from vericache_core.kv import LayerDescriptor

Pages = npt.NDArray[np.bool_]
"""One truth value for each page."""


class TierStore(ABC):
    """Rows of the offloaded layers of one request, outside of device memory.

    Args:
        link: what comes back comes over it; writes do not.

    Attributes:
        copied: whether a load is a copy in memory that the cores make on which the steps run: then it waits for no thread, and
            whoever takes the layer makes it, on all of them.
        moved_bytes: bytes of whole loads read back so far; one that fails or is stopped is none.
        written_bytes: bytes of rows that steps wrote so far.
    """

    def __init__(self, link: Link | None = None) -> None:
        self._link = link or Link()
        self.copied = False
        self.moved_bytes = 0
        self.written_bytes = 0

    @abstractmethod
    def write(self, layer: LayerDescriptor, first: int, count: int, slot: PagedRows) -> None:
        """Persist rows ``first .. first + count`` out of ``slot``."""

    def read(
        self,
        layer: LayerDescriptor,
        tokens: int,
        slot: PagedRows,
        missing: Sequence[Index] | None,
        stop: threading.Event | None = None,
    ) -> Pages:
        """Fill ``slot`` with rows below ``tokens``, no faster than the link allows.

        ``missing`` lists per KV head the positions wanted, ``None`` means all. Returns of which pages ``[pages]`` only
        what was wanted has been read; of the others it was every row.

        Raises:
            SwapError: the tier could not be read, or ``stop`` was set before all of it had come.
        """
        stop = stop or threading.Event()
        started = self._link.now()
        unread = self.fetch(layer, tokens, slot, missing, stop)
        self.arrive(layer, tokens, missing, stop, started)
        return unread

    def arrive(
        self,
        layer: LayerDescriptor,
        tokens: int,
        missing: Sequence[Index] | None,
        stop: threading.Event,
        started: float | None = None,
    ) -> None:
        """Wait for as long as the link takes for what :meth:`fetch` moves, from ``started`` (now) on, and count it.

        Raises:
            SwapError: ``stop`` was set meanwhile.
        """
        started = self._link.now() if started is None else started
        nbytes = self.load_bytes(layer, tokens, missing)
        self._link.hold(started, nbytes, stop)
        self.moved_bytes += nbytes  # after the wait: over the link, a load that is stopped in it has not come

    @abstractmethod
    def load_bytes(self, layer: LayerDescriptor, tokens: int, missing: Sequence[Index] | None) -> int:
        """Bytes that a load of ``missing`` rows moves."""

    @abstractmethod
    def fetch(
        self, layer: LayerDescriptor, tokens: int, slot: PagedRows, missing: Sequence[Index] | None, stop: threading.Event
    ) -> Pages:
        """As :meth:`read`, at once, and not counted."""

    @abstractmethod
    def copy_out(self, layer: LayerDescriptor, pages: range, target: Extent) -> None:
        """Copy whole ``pages`` into ``target``, an extent on the CPU."""

    @abstractmethod
    def copy_in(self, layer: LayerDescriptor, first: int, keys: memoryview, values: memoryview) -> None:
        """Fill whole pages from page ``first`` on with bytes in their own layout."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held on this tier."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back; safe to call twice."""


class HostStore(TierStore):
    """Pages in host memory, pinned when the device is a CUDA one. Moves single rows."""

    def __init__(self, layers: Iterable[LayerDescriptor], device: torch.device, link: Link | None = None) -> None:
        super().__init__(link)
        self._pinned, self.copied = device.type == "cuda", device.type == "cpu"
        self._rows = {layer.index: PagedRows(layer, torch.device("cpu")) for layer in layers}

    def write(self, layer: LayerDescriptor, first: int, count: int, slot: PagedRows) -> None:
        home = self._home(layer, pages_for(first + count))
        keys, values = slot.rows(first, first + count)
        home.write(np.full(layer.kv_heads, first, dtype=np.int64), keys.to("cpu"), values.to("cpu"))
        self.written_bytes += count * layer.token_bytes

    def load_bytes(self, layer: LayerDescriptor, tokens: int, missing: Sequence[Index] | None) -> int:
        rows = tokens * layer.kv_heads if missing is None else sum(map(len, missing))
        return rows * layer.token_bytes // layer.kv_heads

    def fetch(
        self, layer: LayerDescriptor, tokens: int, slot: PagedRows, missing: Sequence[Index] | None, stop: threading.Event
    ) -> Pages:
        home = self._rows[layer.index]
        _unless(stop)
        if self.copied:
            wanted = [np.arange(tokens, dtype=np.int64)] * layer.kv_heads if missing is None else missing
            copy_heads(home, slot, [(at, at) for at in wanted])
        elif missing is None:
            for page in range(pages_for(tokens)):
                _unless(stop)
                for source, target in zip(home.page(page), slot.page(page), strict=True):
                    _copy(source, target)
        else:
            for head, at in enumerate(missing):
                _unless(stop)
                copy_rows(home, at, slot, at, head)
        return np.full(pages_for(tokens), missing is not None)

    def copy_out(self, layer: LayerDescriptor, pages: range, target: Extent) -> None:
        home = self._rows[layer.index]
        for number, page in enumerate(pages):
            for source, copy in zip(home.page(page), (target.keys[number], target.values[number]), strict=True):
                _copy(source, copy)

    def copy_in(self, layer: LayerDescriptor, first: int, keys: memoryview, values: memoryview) -> None:
        parts = list(by_page(layer, keys, values))
        home = self._home(layer, first + len(parts))
        for page, part in enumerate(parts, first):
            fill_page(home.page(page), *part)

    def _home(self, layer: LayerDescriptor, pages: int) -> PagedRows:
        """Rows of ``layer``, grown to ``pages`` pages."""
        home = self._rows[layer.index]
        missing = pages - home.capacity // PAGE
        try:
            if missing > 0:
                home.adopt(Extent.allocate(layer, missing, home.device, pinned=self._pinned))
        except (MemoryError, RuntimeError) as error:
            raise SwapError("host memory for the full KV could not be had", cause=str(error)) from error
        return home

    @property
    def nbytes(self) -> int:
        return sum(rows.nbytes for rows in self._rows.values())

    def close(self) -> None:
        self._rows = {}


class DiskStore(TierStore):
    """Pages in a file, one record a page with all layers in it. Moves whole pages.

    The file is unlinked as soon as it is open, so nothing can be left behind, not even by a killed
    process. Reads and writes are positional (``pread``/``pwrite``) into the ring's own buffers: against
    mapping the file this saves a second resident copy and turns an I/O error into an exception where a
    mapping would end the process with SIGBUS.
    """

    def __init__(self, layers: Sequence[LayerDescriptor], directory: str | None, link: Link | None = None) -> None:
        super().__init__(link)
        self._offsets: dict[int, int] = {}
        self._record = 0
        for layer in layers:
            self._offsets[layer.index] = self._record
            self._record += PAGE * layer.token_bytes
        self._pages = 0
        self._file: int | None = None
        try:
            self._file, path = tempfile.mkstemp(prefix="vericache-", suffix=".swap", dir=directory)
            Path(path).unlink()
        except OSError as error:
            raise SwapError(
                f"no swap file in {directory or tempfile.gettempdir()}",
                cause=str(error),
                hint="set swap_dir to a writable folder",
            ) from error

    def write(self, layer: LayerDescriptor, first: int, count: int, slot: PagedRows) -> None:
        for page in range(first // PAGE, pages_for(first + count)):
            self._transfer(layer, page, slot, "written")
            self._pages = max(self._pages, page + 1)
        self.written_bytes += count * layer.token_bytes

    def load_bytes(self, layer: LayerDescriptor, tokens: int, missing: Sequence[Index] | None) -> int:
        return int((~self._unread(tokens, missing)).sum()) * PAGE * layer.token_bytes

    def fetch(
        self, layer: LayerDescriptor, tokens: int, slot: PagedRows, missing: Sequence[Index] | None, stop: threading.Event
    ) -> Pages:
        unread = self._unread(tokens, missing)
        for page in np.flatnonzero(~unread):
            _unless(stop)
            self._transfer(layer, int(page), slot, "read")
        return unread

    def _unread(self, tokens: int, missing: Sequence[Index] | None) -> Pages:
        """Which pages hold no row of ``missing``."""
        unread = np.full(pages_for(tokens), missing is not None)
        for wanted in missing or ():
            unread[wanted // PAGE] = False
        return unread

    def copy_out(self, layer: LayerDescriptor, pages: range, target: Extent) -> None:
        for number, page in enumerate(pages):
            offset = page * self._record + self._offsets[layer.index]
            for part in (target.keys[number], target.values[number]):
                offset = self._move(_bytes(part), offset, "read")

    def copy_in(self, layer: LayerDescriptor, first: int, keys: memoryview, values: memoryview) -> None:
        for page, parts in enumerate(by_page(layer, keys, values), first):
            offset = page * self._record + self._offsets[layer.index]
            for part in parts:
                offset = self._move(part, offset, "written")
            self._pages = max(self._pages, page + 1)

    def _transfer(self, layer: LayerDescriptor, page: int, slot: PagedRows, verb: str) -> None:
        offset = page * self._record + self._offsets[layer.index]
        for part in slot.page(page):
            staged = part if part.device.type == "cpu" else torch.empty_like(part, device="cpu")
            if verb == "written" and staged is not part:
                staged.copy_(part)
            offset = self._move(_bytes(staged), offset, verb)
            if verb == "read" and staged is not part:
                part.copy_(staged)

    def _move(self, buffer: memoryview, offset: int, verb: str) -> int:
        """Move all of ``buffer`` to or from ``offset``; returns where it ends."""
        if self._file is None:
            raise SwapError("the swap file is closed")
        try:
            done = os.preadv(self._file, [buffer], offset) if verb == "read" else os.pwrite(self._file, buffer, offset)
        except OSError as error:
            raise SwapError(f"full KV could not be {verb}", cause=str(error), hint="check the disk behind swap_dir") from error
        if done != buffer.nbytes:
            raise SwapError(f"full KV could not be {verb}", cause=f"{done} of {buffer.nbytes} bytes at offset {offset}")
        return offset + done

    @property
    def nbytes(self) -> int:
        return self._pages * self._record

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _unless(stop: threading.Event) -> None:
    if stop.is_set():
        raise SwapError(STOPPED)


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(tensor.view(torch.uint8).numpy().reshape(-1).data)


def _copy(source: Tensor, target: Tensor) -> None:
    """Copy a page; between CPU pages through numpy, which holds no lock and starts no thread pool."""
    if target.device.type == "cpu":
        np.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())
    else:
        target.copy_(source, non_blocking=True)
