"""Admission: before an engine serves a model, the model is checked against its own full forward.

Two questions. Does a block of rows after a cache give what one whole forward through the model's own
attention gives (masks, positions, windows, scaling)? And, for ``identity="bitwise"``, do rows keep their
bits in any company (the probe)?
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vericache_core.errors import IdentityError, UnsupportedModelError
from vericache_core.model.adapter import ModelAdapter
from vericache_core.model.probe import Attend, ProbeReport, Sequence1, row_invariance, run_blocks, shape_failures

TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 0.1, torch.float16: 0.02, torch.float64: 2e-4}
"""Largest allowed difference to the model's own forward, as a share of its largest logit."""
LONGEST_CHECK = 700
"""Tokens of the check at most; a sliding window beyond that is not exercised."""


@dataclass(frozen=True)
class Admission:
    """Result of the checks.

    Attributes:
        identity: the promise the engine makes.
        forward_error: largest difference to the model's own forward, relative to its largest logit.
        probe: report of the row-invariance probe, ``None`` if it was switched off.
        shapes: row counts of steps that give every row the same bits, ascending.
        refused_shapes: why others do not, by row count.
    """

    identity: str
    forward_error: float
    probe: ProbeReport | None
    shapes: tuple[int, ...] = ()
    refused_shapes: Mapping[int, str] = field(default_factory=dict)


def other_shapes(rows: int) -> list[int]:
    """Row counts that are tried beside ``rows``: from a quarter of it to four times.

    Where rows are not free (no matrix unit) a step should not pad much; a power of two above the rows may double its products.
    """
    return sorted({max(2, rows * quarters // 4) for quarters in (1, 2, 3, 5, 6, 7, 8, 9, 10, 12, 14, 16)} - {rows})


def admit(
    adapter: ModelAdapter, attend: Attend, identity: str, probe: bool = True, candidates: Sequence[int] = ()
) -> Admission:
    """Check the model, or refuse it; ``adapter.shapes`` becomes what the probe allows.

    ``candidates`` are further row counts. One is used only if every row gets the bits there that it has in a step
    of ``adapter.rows``, so without the probe there is one shape.

    Raises:
        UnsupportedModelError: rows after a cache are not those of a whole forward.
        IdentityError: ``identity="bitwise"`` was asked for and the probe found bits that differ.
    """
    error = forward_error(adapter, attend)
    allowed = TOLERANCE[adapter.dtype]
    if not error <= allowed:
        raise UnsupportedModelError(
            f"{adapter.name}: rows computed after a cache differ from the model's own forward",
            cause=f"by {error:.2g} of the largest logit, allowed {allowed:g}",
            hint="the model does something in attention that the interface does not tell",
        )
    report = row_invariance(adapter, attend) if probe else None
    if report is not None and not report.passed and identity == "bitwise":
        raise IdentityError(
            "identity='bitwise' cannot be promised here: rows change bits with their company",
            cause="; ".join(report.failures[:3]),
            hint="another dtype, thread count or rows may pass; identity='token' runs without the promise",
        )
    refused: dict[int, str] = {}
    if probe and candidates and not (report is not None and report.failures):
        refused = shape_failures(adapter, attend, candidates)
        adapter.shapes = tuple(sorted({adapter.rows, *candidates} - set(refused)))
    return Admission(identity, error, report, adapter.shapes, refused)


def forward_error(adapter: ModelAdapter, attend: Attend) -> float:
    """Largest logit difference between blocks after a cache and one whole forward, relative to the largest logit."""
    windows = [layer.sliding_window for layer in adapter.layers if layer.sliding_window]
    length = 19 if not windows else min(max(windows) + 19, LONGEST_CHECK)
    if adapter.max_positions is not None:
        length = min(length, adapter.max_positions)
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, adapter.vocab_size, (length,), generator=draw).tolist()
    with torch.inference_mode():
        whole: Tensor = adapter.model(input_ids=torch.tensor([ids], device=adapter.device), use_cache=False).logits[0].float()
    sequence, widths = Sequence1(adapter), (7, 1, 5, 2, adapter.rows)
    rows: list[Tensor] = []
    while sequence.tokens < length:
        width = min(widths[len(rows) % len(widths)], adapter.rows)
        block = ids[sequence.tokens : sequence.tokens + width]
        rows.append(run_blocks(adapter, attend, [(sequence, block)])[0].float())
        sequence.advance(len(block))
    difference = (torch.cat(rows) - whole).abs().max() / whole.abs().max().clamp_min(1e-9)
    return float(difference) if torch.isfinite(difference) else float("inf")
