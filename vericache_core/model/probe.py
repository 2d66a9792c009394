"""The row-invariance probe: does this model on this machine give a row the same bits in any company?

It decodes one sequence a token a step, then computes the same rows again in blocks of several widths, at
other places in the step, beside a neighbour of another length, and across a page boundary, and compares
every logits row and every KV row bit for bit. Lengths are odd and prime on purpose: round ones hide faults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vericache_core.attention.paged import AttentionJob
from vericache_core.cache.pages import PAGE, PagedRows
from vericache_core.model.adapter import ModelAdapter, layer_index

Attend = Callable[[Tensor, Tensor, Tensor, Sequence[AttentionJob], float], Tensor]


class Sequence1:
    """A sequence with its own device pages; the smallest full KV there is."""

    def __init__(self, adapter: ModelAdapter) -> None:
        self.pages = [PagedRows(layer, adapter.device) for layer in adapter.layers]
        self.tokens = 0

    def advance(self, rows: int) -> None:
        self.tokens += rows
        for pages in self.pages:
            pages.grow_lengths(rows)

    def rollback(self, tokens: int) -> None:
        """Go back to ``tokens`` rows. Sliding windows keep everything here, so nothing is ever released."""
        for pages in self.pages:
            pages.lengths = pages.lengths - (self.tokens - tokens)
        self.tokens = tokens


class PlainStep:
    """Attention of a step over :class:`Sequence1` blocks: ``(sequence, first row, count)``."""

    def __init__(self, adapter: ModelAdapter, attend: Attend, blocks: Sequence[tuple[Sequence1, int, int]]) -> None:
        self._adapter, self._attend, self._blocks = adapter, attend, blocks
        self._bases: dict[tuple[int, int], npt.NDArray[np.int64]] = {}

    def attend(self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, facts: dict[str, Any]) -> Tensor:
        layer = self._adapter.layers[layer_index(module)]
        jobs = []
        for sequence, first, count in self._blocks:
            at = (sequence.tokens, layer.kv_heads)
            if at not in self._bases:
                self._bases[at] = np.full(layer.kv_heads, sequence.tokens, dtype=np.int64)
            jobs.append(
                AttentionJob(first, count, sequence.pages[layer.index], self._bases[at], sequence.tokens, layer.sliding_window)
            )
        return self._attend(query, key, value, jobs, layer.scaling).to(query.dtype)


def run_blocks(
    adapter: ModelAdapter, attend: Attend, parts: Sequence[tuple[Sequence1, Sequence[int]]], shift: int = 0
) -> list[Tensor]:
    """One step over several sequences, after ``shift`` rows of padding; logits rows ``[count, vocab]`` of each.

    The caller decides with ``Sequence1.advance`` whether the rows stay.
    """
    blocks, tokens, positions, first = [], [0] * shift, [0] * shift, shift
    for sequence, ids in parts:
        blocks.append((sequence, first, len(ids)))
        tokens += ids
        positions += range(sequence.tokens, sequence.tokens + len(ids))
        first += len(ids)
    logits = adapter.step(tokens, positions, PlainStep(adapter, attend, blocks))
    return [logits[start : start + count] for _, start, count in blocks]


@dataclass
class ProbeReport:
    """What the probe compared. ``failures`` says in words where bits differed."""

    logits_rows: int = 0
    kv_rows: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.failures


CASES = (
    (1, "in the last row"),
    (1, "beside a neighbour"),
    (2, "beside a neighbour"),
    (3, "shifted"),
    (5, "beside a neighbour"),
    (7, "alone"),
    (11, "shifted"),
)
"""Block width and company of each comparison."""


def row_invariance(adapter: ModelAdapter, attend: Attend, decoded: int = 11, seed: int = 0) -> ProbeReport:
    """Run the probe; about 70 steps.

    Args:
        adapter: the model.
        attend: the attention the engine will use.
        decoded: rows that are computed one by one and compared.
        seed: of the random token ids.
    """
    draw = torch.Generator().manual_seed(seed)
    length = PAGE - 5 if adapter.max_positions is None else max(1, min(PAGE - 5, adapter.max_positions - decoded))
    prompt = torch.randint(0, adapter.vocab_size, (length,), generator=draw).tolist()
    tail = torch.randint(0, adapter.vocab_size, (decoded,), generator=draw).tolist()
    report, rows = ProbeReport(), adapter.rows

    one = Sequence1(adapter)
    _prefill(adapter, attend, one, prompt, rows)
    reference = []
    for token in tail:
        (row,) = run_blocks(adapter, attend, [(one, [token])])
        one.advance(1)
        reference.append(row[0].clone())
    expected = [pages.rows(0, one.tokens) for pages in one.pages]

    neighbour, other = Sequence1(adapter), Sequence1(adapter)
    _prefill(adapter, attend, neighbour, tail[:7], rows)
    _prefill(adapter, attend, other, prompt, min(rows, 7))
    for width, company in CASES:
        if width > rows:
            continue
        shift = {"alone": 0, "in the last row": rows - 1}.get(company, min(rows - width, 3))
        got: list[Tensor] = []
        for start in range(0, decoded, width):
            ids = tail[start : start + width]
            if company == "beside a neighbour" and shift:
                _, mine = run_blocks(adapter, attend, [(neighbour, prompt[:shift]), (other, ids)])
            else:
                (mine,) = run_blocks(adapter, attend, [(other, ids)], shift)
            got += list(mine.clone())
            other.advance(len(ids))
        _compare(report, f"blocks of {width} rows, {company}", reference, got, expected, other)
        other.rollback(len(prompt))
    return report


def shape_failures(adapter: ModelAdapter, attend: Attend, shapes: Sequence[int], seed: int = 0) -> dict[int, str]:
    """Of those ``shapes`` whose steps give other bits than steps of ``adapter.rows``: where they first do.

    Every row of a shape is compared, over a page boundary and in a step that is not full, by logits and KV.
    """
    draw = torch.Generator().manual_seed(seed)
    length = max(PAGE + 13, *(shape + 3 for shape in shapes))
    if adapter.max_positions is not None:
        length = min(length, adapter.max_positions)
    ids = torch.randint(0, adapter.vocab_size, (length,), generator=draw).tolist()
    expected, one = _in_steps(adapter, attend, ids, adapter.rows)
    kept = [pages.rows(0, one.tokens) for pages in one.pages]
    refused: dict[int, str] = {}
    for shape in shapes:
        found, other = _in_steps(adapter, attend, ids, shape)
        report = ProbeReport()
        _compare(report, f"steps of {shape} rows", expected, found, kept, other)
        if report.failures:
            refused[shape] = report.failures[0]
    return refused


def _in_steps(adapter: ModelAdapter, attend: Attend, ids: Sequence[int], rows: int) -> tuple[list[Tensor], Sequence1]:
    """Logits of ``ids``, computed in steps of ``rows`` rows and no other shape, and what they leave."""
    before, sequence, logits = adapter.shapes, Sequence1(adapter), []
    adapter.shapes = (rows,)
    try:
        while sequence.tokens < len(ids):
            block = ids[sequence.tokens : sequence.tokens + rows]
            logits += list(run_blocks(adapter, attend, [(sequence, block)])[0].clone())
            sequence.advance(len(block))
    finally:
        adapter.shapes = before
    return logits, sequence


def _prefill(adapter: ModelAdapter, attend: Attend, sequence: Sequence1, ids: Sequence[int], width: int) -> None:
    for start in range(0, len(ids), width):
        block = list(ids[start : start + width])
        run_blocks(adapter, attend, [(sequence, block)])
        sequence.advance(len(block))


def _compare(
    report: ProbeReport,
    where: str,
    reference: Sequence[Tensor],
    got: Sequence[Tensor],
    expected: Sequence[tuple[Tensor, Tensor]],
    sequence: Sequence1,
) -> None:
    report.logits_rows += len(got)
    wrong = sum(not torch.equal(a, b) for a, b in zip(reference, got, strict=True))
    if wrong:
        report.failures.append(f"{where}: {wrong} of {len(got)} logits rows differ")
    for index, (keys, values) in enumerate(expected):
        mine = sequence.pages[index].rows(0, sequence.tokens)
        report.kv_rows += 2 * keys.shape[1]
        if not (torch.equal(keys, mine[0]) and torch.equal(values, mine[1])):
            report.failures.append(f"{where}: KV rows of layer {index} differ")
            return
