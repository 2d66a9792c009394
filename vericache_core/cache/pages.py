"""Append-only paged rows of one layer of one request, on the compute device.

A page holds ``PAGE`` consecutive rows: keys as ``[kv_heads, head_dim, PAGE]`` (rows last, so that one
channel of a whole page is contiguous) and values as ``[kv_heads, PAGE, value_dim]``. Pages come in
extents; growing adds an extent and never moves a row. Each KV head has its own length, because a token
dropper may keep other counts per head; rows are addressed by their index, not their logical position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vericache_core.kv import LayerDescriptor

PAGE = 128
"""Rows in a page, and keys in a block of the fixed-block attention."""


def pages_for(rows: int) -> int:
    """Pages that ``rows`` rows take."""
    return -(-rows // PAGE)


@dataclass(slots=True)
class Extent:
    """``keys [pages, kv_heads, head_dim, PAGE]`` and ``values [pages, kv_heads, PAGE, value_dim]``.

    ``shared`` pages belong to other rows, which count their bytes.
    """

    keys: Tensor
    values: Tensor
    shared: bool = False

    @classmethod
    def allocate(cls, layer: LayerDescriptor, pages: int, device: torch.device, *, pinned: bool = False) -> Extent:
        shape = (pages, layer.kv_heads, layer.head_dim, PAGE)
        value_shape = (pages, layer.kv_heads, PAGE, layer.value_dim)
        # Pages outlive the step that asks for them, and the swap thread writes to them outside of inference mode,
        # which torch allows only if they do not come from it.
        with torch.inference_mode(False):
            return cls(
                torch.empty(shape, dtype=layer.dtype, device=device, pin_memory=pinned),
                torch.empty(value_shape, dtype=layer.dtype, device=device, pin_memory=pinned),
            )

    @property
    def pages(self) -> int:
        return self.keys.shape[0]

    @property
    def nbytes(self) -> int:
        return 0 if self.shared else self.keys.untyped_storage().nbytes() + self.values.untyped_storage().nbytes()


def by_page(layer: LayerDescriptor, keys: memoryview, values: memoryview) -> Iterator[tuple[memoryview, memoryview]]:
    """Cut the bytes of several pages, ``[pages, ...]`` in page layout, into the keys and the values of each."""
    rows = PAGE * layer.kv_heads * layer.dtype.itemsize
    key_bytes, value_bytes = rows * layer.head_dim, rows * layer.value_dim
    for number in range(keys.nbytes // key_bytes):
        mine = slice(number * key_bytes, (number + 1) * key_bytes)
        yield keys[mine], values[number * value_bytes : (number + 1) * value_bytes]


def fill_page(page: tuple[Tensor, Tensor], keys: memoryview, values: memoryview) -> None:
    """Overwrite a page with bytes in its own layout."""
    for target, data in zip(page, (keys, values), strict=True):
        staged = target if target.device.type == "cpu" else torch.empty_like(target, device="cpu")
        np.copyto(staged.view(torch.uint8).numpy().reshape(-1), np.frombuffer(data, dtype=np.uint8))
        if staged is not target:
            target.copy_(staged)


class PagedRows:
    """See the module docstring.

    Attributes:
        lengths: int64 ``[kv_heads]``, rows held per KV head.
        first_row: rows before it were released (sliding windows) and can no longer be read.
    """

    def __init__(self, layer: LayerDescriptor, device: torch.device) -> None:
        self.layer, self.device = layer, device
        self.lengths: npt.NDArray[np.int64] = np.zeros(layer.kv_heads, dtype=np.int64)
        self.first_row = 0
        self._extents: list[tuple[int, Extent | None]] = []  # (first page, pages or None once released)
        self._pages = self._nbytes = 0
        self.key_addresses: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self.value_addresses: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    @property
    def capacity(self) -> int:
        """Rows that fit without growing."""
        return self._pages * PAGE

    @property
    def nbytes(self) -> int:
        """Device bytes held, whole pages."""
        return self._nbytes

    def reserve(self, rows: int) -> None:
        """Grow until ``rows`` rows fit."""
        missing = pages_for(rows) - self._pages
        if missing > 0:
            # A window can only be released page by page if its pages do not share an extent.
            sizes = [1] * missing if self.layer.kind == "sliding" else [missing]
            for pages in sizes:
                self.adopt(Extent.allocate(self.layer, pages, self.device))

    def adopt(self, extent: Extent) -> None:
        """Add the pages of ``extent`` at the end."""
        self._extents.append((self._pages, extent))
        self._nbytes += extent.nbytes
        self._pages += extent.pages
        key_step = extent.keys.stride(0) * extent.keys.element_size()
        value_step = extent.values.stride(0) * extent.values.element_size()
        steps = np.arange(extent.pages, dtype=np.int64)
        self.key_addresses = np.concatenate([self.key_addresses, extent.keys.data_ptr() + steps * key_step])
        self.value_addresses = np.concatenate([self.value_addresses, extent.values.data_ptr() + steps * value_step])

    def skip(self, pages: int) -> None:
        """Begin with ``pages`` pages that are not here, as if a sliding window had left them behind."""
        assert not self._pages, "only what is empty can skip pages"
        if pages:
            self._extents.append((0, None))
            self._pages, self.first_row = pages, pages * PAGE
            self.key_addresses = np.zeros(pages, dtype=np.int64)
            self.value_addresses = np.zeros(pages, dtype=np.int64)

    def begin_with(self, other: PagedRows, lengths: npt.NDArray[np.int64]) -> None:
        """Start with the first ``lengths`` (int64 ``[kv_heads]``) rows of ``other``; only while nothing is held.

        Pages full of them are shared, not copied: rows are append only, so nobody may write to them again, and
        ``other`` must not go back behind them. The page that the rows end in is copied.
        """
        assert not self._pages, "these rows hold pages already"
        whole = int(lengths.min()) // PAGE
        for first, extent in other._extents:
            if first >= whole:
                break
            if extent is not None:
                taken = min(extent.pages, whole - first)
                self.adopt(Extent(extent.keys[:taken], extent.values[:taken], shared=True))
                continue
            if not self._pages:  # released: one gap up to the first row that is left
                self.skip(pages_for(other.first_row))
        self.reserve(int(lengths.max()))
        for number in range(max(whole, self.first_row // PAGE), pages_for(int(lengths.max()))):
            for mine, theirs in zip(self.page(number), other.page(number), strict=True):
                mine.copy_(theirs)
        self.lengths = lengths.copy()

    def page(self, number: int) -> tuple[Tensor, Tensor]:
        """``(keys [kv_heads, head_dim, PAGE], values [kv_heads, PAGE, value_dim])``, views."""
        for first, extent in reversed(self._extents):
            if number >= first:
                if extent is None:
                    break
                return extent.keys[number - first], extent.values[number - first]
        raise IndexError(f"page {number} was released or never allocated")

    def write(self, at: npt.NDArray[np.int64], keys: Tensor, values: Tensor) -> None:
        """Store rows at index ``at[h] ..`` of each KV head; does not change ``lengths``.

        ``keys`` is ``[kv_heads, n, head_dim]``, ``values`` ``[kv_heads, n, value_dim]``.
        """
        count = keys.shape[1]
        self.reserve(int(at.max()) + count)
        uniform = bool((at == at[0]).all())
        for head in [slice(None)] if uniform else [slice(h, h + 1) for h in range(len(at))]:
            index, done = int(at[head][0]), 0
            while done < count:
                page, offset = divmod(index + done, PAGE)
                n = min(PAGE - offset, count - done)
                page_keys, page_values = self.page(page)
                page_keys[head, :, offset : offset + n] = keys[head, done : done + n].transpose(1, 2)
                page_values[head, offset : offset + n] = values[head, done : done + n]
                done += n

    def put_head(self, head: int, keys: Tensor, values: Tensor) -> None:
        """Store ``keys [n, head_dim]`` and ``values [n, value_dim]`` of one KV head from index 0 on."""
        for start in range(0, keys.shape[0], PAGE):
            page_keys, page_values = self.page(start // PAGE)
            count = min(PAGE, keys.shape[0] - start)
            page_keys[head, :, :count] = keys[start : start + count].T
            page_values[head, :count] = values[start : start + count]

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add ``keys [kv_heads, n, head_dim]`` and ``values [kv_heads, n, value_dim]`` at the end."""
        self.write(self.lengths, keys, values)
        self.lengths = self.lengths + keys.shape[1]

    def grow_lengths(self, rows: int) -> None:
        """Count ``rows`` rows that a kernel has written at the end."""
        self.lengths = self.lengths + rows
        if int(self.lengths.max()) > self.capacity:
            raise IndexError(f"{int(self.lengths.max())} rows do not fit in {self.capacity}")

    def rollback(self, rows: int) -> None:
        """Forget the newest ``rows`` rows of every head, exactly.

        Raises:
            IndexError: fewer rows are held, or released rows would have to come back.
        """
        shorter = self.lengths - rows
        window = self.layer.sliding_window if self.layer.kind == "sliding" else None
        needed = 0 if window is None else int(shorter.min()) - window + 1
        if rows < 0 or int(shorter.min()) < 0 or (self.first_row and needed < self.first_row):
            raise IndexError(f"cannot roll back {rows} rows of {self.lengths.tolist()}, the first {self.first_row} are gone")
        self.lengths = shorter

    def release_before(self, row: int) -> None:
        """Free the extents whose rows all lie before ``row``."""
        for number, (first, extent) in enumerate(self._extents):
            if extent is not None and (first + extent.pages) * PAGE <= row:
                self.key_addresses[first : first + extent.pages] = 0
                self.value_addresses[first : first + extent.pages] = 0
                self._extents[number] = (first, None)
                self._nbytes -= extent.nbytes
                self.first_row = (first + extent.pages) * PAGE

    def rows(self, start: int, stop: int, head: int | None = None) -> tuple[Tensor, Tensor]:
        """Copies of rows ``start:stop``: ``(keys [kv_heads, n, head_dim], values [kv_heads, n, value_dim])``.

        With ``head`` only that KV head: ``[1, n, ...]``.
        """
        which = slice(None) if head is None else slice(head, head + 1)
        keys, values = [], []
        for page in range(start // PAGE, pages_for(stop)):
            low, high = max(start - page * PAGE, 0), min(stop - page * PAGE, PAGE)
            page_keys, page_values = self.page(page)
            keys.append(page_keys[which, :, low:high].transpose(1, 2))
            values.append(page_values[which, low:high])
        if not keys:
            heads = len(range(self.layer.kv_heads)[which])
            empty = torch.empty((heads, 0, self.layer.head_dim), dtype=self.layer.dtype, device=self.device)
            return empty, empty.new_empty((heads, 0, self.layer.value_dim))
        return torch.cat(keys, 1), torch.cat(values, 1)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if lengths, pages and addresses disagree."""
        assert (self.lengths >= 0).all(), self.lengths
        assert self._nbytes == sum(extent.nbytes for _, extent in self._extents if extent is not None)
        assert int(self.lengths.max(initial=0)) <= self.capacity, (self.lengths, self.capacity)
        assert self._pages == sum(extent.pages for _, extent in self._extents if extent is not None) + self.first_row // PAGE
        for number in range(self.first_row // PAGE, self._pages):
            keys, values = self.page(number)
            assert self.key_addresses[number] == keys.data_ptr()
            assert self.value_addresses[number] == values.data_ptr()
