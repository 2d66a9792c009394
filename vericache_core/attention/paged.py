"""The fixed-block attention of the law over paged rows: the torch reference.

For one query row and head the arithmetic is: walk the pages in order, in each compute the scores of its
``PAGE`` keys, hide those outside ``[start, limit)``, fold them into an online softmax in float32. What a
row computes therefore depends on its own limit and on the rows of KV before it, never on its neighbours
in the step or on how far they look. Every matrix product has one fixed shape: ``tile`` query rows
(short ones padded) against one page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vericache_core.attention.online import AttentionState
from vericache_core.attention.sources import CodedPart
from vericache_core.cache.pages import PAGE, PagedRows, pages_for


class Prefix(Protocol):
    """Compressed rows that fill the softmax state before the pages are walked."""

    def attend(self, query: Tensor, state: AttentionState) -> None:
        """See :meth:`vericache_core.kv.CompressedLayer.attend`."""

    def parts(self) -> Sequence[CodedPart] | None:
        """See :meth:`vericache_core.kv.CompressedLayer.parts`."""


@dataclass(slots=True)
class AttentionJob:
    """Rows of one request in one layer of one step.

    Attributes:
        first, count: the rows of the step's tile.
        pages: where their new KV rows go and what they attend to.
        base: int64 ``[kv_heads]``, index per KV head at which the first new row is stored; row ``i`` sees
            the indices below ``base + i + 1``.
        position: logical position of the first row; with ``window`` row ``i`` sees nothing before
            ``position + i - window + 1`` (only where index equals position).
        window: sliding window, ``None`` for full attention.
        prefix: compressed rows that come before everything in ``pages``.
    """

    first: int
    count: int
    pages: PagedRows
    base: npt.NDArray[np.int64]
    position: int
    window: int | None = None
    prefix: Prefix | None = None

    def starts(self) -> npt.NDArray[np.int64]:
        """int64 ``[count]``: first index that each row sees."""
        if self.window is None:
            return np.zeros(self.count, dtype=np.int64)
        starts: npt.NDArray[np.int64] = np.maximum(0, self.position + np.arange(self.count) - self.window + 1)
        return starts

    def limits(self) -> npt.NDArray[np.int64]:
        """int64 ``[count, kv_heads]``: first index that each row no longer sees."""
        limits: npt.NDArray[np.int64] = self.base[None, :] + np.arange(1, self.count + 1)[:, None]
        return limits


def attend_reference(query: Tensor, keys: Tensor, values: Tensor, jobs: Sequence[AttentionJob], scaling: float = 1.0) -> Tensor:
    """Store the new rows of every job, then attend.

    Args:
        query: ``[rows, heads, head_dim]``, any float dtype.
        keys: ``[rows, kv_heads, head_dim]`` in the cache dtype, new rows.
        values: ``[rows, kv_heads, value_dim]``.
        jobs: disjoint row ranges; rows of no job come out as zeros.
        scaling: factor on every score.

    Returns:
        float32 ``[rows, heads, value_dim]``.
    """
    tile = query.shape[0]
    query = query.float() * scaling
    output = query.new_zeros((tile, query.shape[1], values.shape[2]))
    for job in jobs:
        mine = slice(job.first, job.first + job.count)
        job.pages.write(job.base, keys[mine].transpose(0, 1), values[mine].transpose(0, 1))
        padded = query.new_zeros((query.shape[1], tile, query.shape[2]))
        padded[:, : job.count] = query[mine].transpose(0, 1)
        state = AttentionState.fresh(query.shape[1], tile, values.shape[2], query.device)
        if job.prefix is not None:
            job.prefix.attend(padded, state)
        _walk(padded, state, job)
        output[mine] = state.output()[:, : job.count].transpose(0, 1)
    return output


def start_state(query: Tensor, value_dim: int, jobs: Sequence[AttentionJob], scaling: float = 1.0) -> AttentionState:
    """The state ``[rows, heads]`` that pages are folded into by a kernel: fresh, or what compressed prefixes left.

    ``query`` is ``[rows, heads, head_dim]``, ``scaling`` what it lacks.
    """
    rows, heads = query.shape[:2]
    state = AttentionState.fresh(rows, heads, value_dim, query.device)
    for job in jobs:
        if job.prefix is None:
            continue
        mine = slice(job.first, job.first + job.count)
        part = AttentionState.fresh(heads, job.count, value_dim, query.device)
        job.prefix.attend((query[mine].float() * scaling).transpose(0, 1).contiguous(), part)
        state.top[mine], state.total[mine], state.acc[mine] = part.top.T, part.total.T, part.acc.transpose(0, 1)
    return state


def _walk(padded: Tensor, state: AttentionState, job: AttentionJob) -> None:
    tile, device = padded.shape[1], padded.device
    limits = torch.zeros((len(job.base), 1, tile, 1), dtype=torch.int64, device=device)
    limits[:, 0, : job.count, 0] = torch.from_numpy(job.limits().T).to(device)
    starts = torch.zeros((1, 1, tile, 1), dtype=torch.int64, device=device)
    starts[0, 0, : job.count, 0] = torch.from_numpy(job.starts()).to(device)
    first_page = int(job.starts()[0]) // PAGE
    for number in range(first_page, pages_for(int(job.limits().max()))):
        page_keys, page_values = job.pages.page(number)
        index = torch.arange(number * PAGE, (number + 1) * PAGE, device=device)
        hidden = (index >= limits) | (index < starts)
        state.fold(padded, page_keys.transpose(1, 2), page_values, hidden)
