"""White-box runs: integrity checks after every step, and the full KV rows that a request ends with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vericache_core.engine import Engine
from vericache_core.outputs import RequestOutput
from vericache_core.runtime.request import Request

Rows = list[tuple[int, Tensor, Tensor]]
"""Per layer ``(first row, keys, values)``; sliding layers start where rows are still held."""


@dataclass
class Watch:
    """What `watching` saw. ``rows`` is in the order in which requests came in."""

    engine: Engine
    rows: dict[int, Rows] = field(default_factory=dict)
    steps: int = 0
    resident: list[int] = field(default_factory=list)

    def in_order(self) -> list[Rows]:
        return [self.rows[number] for number in sorted(self.rows)]


@contextmanager
def watching(engine: Engine) -> Iterator[Watch]:
    """Check every stateful object of ``engine`` after each step and keep the final full KV rows."""
    watch, loop = Watch(engine), engine.loop
    step, remove = loop.step, loop.remove

    def checked_step() -> list[Request]:
        finished = step()
        watch.steps += 1
        for request in loop.requests:
            if request.number == loop.background.number:
                continue  # its step is open on the verify thread, which owns its full KV until the verdict is collected
            request.check_integrity()
            request.chooser.check_integrity()
            request.output.check_integrity()
        loop.ring.check_integrity()
        watch.resident.append(loop.ring.nbytes + sum(request.device_bytes() for request in loop.requests))
        return finished

    def recording_remove(request: Request) -> None:
        if request.error is None and request.full.tokens and request.number not in watch.rows:
            watch.rows[request.number] = _rows(engine, request)
        remove(request)

    loop.step, loop.remove = checked_step, recording_remove  # type: ignore[method-assign]
    try:
        yield watch
    finally:
        del loop.step, loop.remove


def _rows(engine: Engine, request: Request) -> Rows:
    found = []
    for layer in engine.adapter.layers:
        first = 0 if layer.sliding_window is None else max(0, request.full.tokens - layer.sliding_window + 1)
        found.append((first, *request.full.read(layer.index, first, request.full.tokens)))
    return found


def same_rows(ours: Rows, theirs: Rows) -> bool:
    """Bit for bit equal."""
    return len(ours) == len(theirs) and all(
        a[0] == b[0] and same_bits(a[1], b[1]) and same_bits(a[2], b[2]) for a, b in zip(ours, theirs, strict=True)
    )


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Equal in shape, dtype and every bit (so -0.0 is not 0.0, and NaN equals itself)."""
    words = {4: torch.int32, 2: torch.int16}[ours.element_size()]
    return (
        ours.dtype == theirs.dtype
        and ours.shape == theirs.shape
        and torch.equal(ours.contiguous().view(words), theirs.contiguous().view(words))
    )


def assert_same(ours: RequestOutput, theirs: RequestOutput) -> None:
    """Everything a user sees is equal, and every recorded logit bit."""
    assert ours.error is None, ours.error
    assert theirs.error is None, theirs.error
    assert ours.token_ids == theirs.token_ids
    assert (ours.text, ours.finish_reason, ours.stop_reason) == (theirs.text, theirs.finish_reason, theirs.stop_reason)
    assert ours.logprobs == theirs.logprobs
    assert (ours.logits is None) == (theirs.logits is None)
    if ours.logits is not None and theirs.logits is not None:
        assert same_bits(ours.logits, theirs.logits)
