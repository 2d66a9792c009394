"""A short calibration: run steps of every shape with and without KV, move some KV, and fit the cost model."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from vericache_core.cache.pages import PagedRows
from vericache_core.cache.tiers import DiskStore, HostStore, TierStore
from vericache_core.model.adapter import ModelAdapter
from vericache_core.model.probe import Attend, Sequence1, run_blocks
from vericache_core.runtime.calibration import Fingerprint, processor_name
from vericache_core.runtime.costs import Block, CostModel, StepLoad, StepSample, SwapSample, fit

CONTEXT = 2048
"""Cached tokens of the steps that measure attention, unless the model takes fewer."""
REPEATS = 3


def measure(adapter: ModelAdapter, attend: Attend, swap_dir: str | None = None, repeats: int = REPEATS) -> CostModel:
    """Measure this model on this machine: of ``repeats`` interleaved runs of each step the fastest, of each swap the median.

    Whatever else runs here only ever slows a step, and one slow shape among fast ones would mislead every choice.

    Raises:
        ConfigError, SwapError: a tier cannot be used or a clock stood still.
    """
    context = CONTEXT if adapter.max_positions is None else min(CONTEXT, adapter.max_positions - adapter.most_rows - 1)
    token_bytes = sum(layer.token_bytes for layer in adapter.layers)
    sequences = [Sequence1(adapter) for _ in range(4)]
    for sequence in sequences:
        for pages in sequence.pages:
            pages.reserve(context + adapter.most_rows)
            for part in (part for number in range(pages.capacity // pages.page(0)[1].shape[1]) for part in pages.page(number)):
                part.zero_()  # pages come as they were; not-a-number would cost nothing extra but says nothing either
    runs = []
    for count, cached, rows in _blocks(adapter.shapes, len(sequences), context):
        shape = next(shape for shape in adapter.shapes if shape >= count * rows)
        tokens = cached + rows / 2  # of its own block a row sees half, on average
        block = Block(tokens * token_bytes, rows * tokens if rows > 1 else 0.0)
        runs.append((StepLoad(shape, (block,) * count), _step(adapter, attend, sequences[:count], cached, rows)))
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for (_, run), own in zip(runs, times, strict=True):
            own.append(_seconds(run, adapter.device))
    steps = [StepSample(load, min(own)) for (load, _), own in zip(runs, times, strict=True)]
    return fit(steps, _swaps(adapter, context, swap_dir, repeats), len(adapter.layers))


def _blocks(shapes: Sequence[int], sequences: int, context: int) -> list[tuple[int, int, int]]:
    """Steps to measure, each as how many blocks alike it has, their cached tokens and their rows."""
    some = min(sequences, shapes[0])
    found = [(some, context, 1)]
    for shape in shapes:
        # A step runs in the smallest shape that holds its rows, so a shape is measured with as many rows as it has.
        found += [(1, 0, shape), (1, context, shape)]
    # Verifies are blocks of a few rows, for which reading and multiplying take about as long.
    return found + [(some, context, shape // some) for shape in shapes[:2] if shape // some > 1]


def fingerprint(adapter: ModelAdapter) -> Fingerprint:
    """What a calibration of this model on this machine is bound to."""
    digest = hashlib.sha256()
    for name, weight in adapter.model.named_parameters():
        head = weight.detach().flatten()[:4096].contiguous().cpu().view(torch.uint8)
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(head.numpy().tobytes())
    where = torch.cuda.get_device_name(adapter.device) if adapter.device.type == "cuda" else processor_name()
    weights, dtype = digest.hexdigest()[:32], str(adapter.dtype).removeprefix("torch.")
    return Fingerprint(where, torch.get_num_threads(), torch.__version__, adapter.name, weights, dtype)


def _step(
    adapter: ModelAdapter, attend: Attend, sequences: Sequence[Sequence1], cached: int, block: int
) -> Callable[[], object]:
    def run() -> object:
        for sequence in sequences:
            sequence.tokens = cached
        return run_blocks(adapter, attend, [(sequence, [0] * block) for sequence in sequences])

    return run


def _swaps(adapter: ModelAdapter, context: int, swap_dir: str | None, repeats: int) -> list[SwapSample]:
    layer = next((layer for layer in adapter.layers if layer.kind == "full"), None)
    if layer is None:
        return []
    samples = []
    stores: dict[str, TierStore] = {"host": HostStore([layer], adapter.device), "disk": DiskStore([layer], swap_dir)}
    slot = PagedRows(layer, adapter.device)
    slot.reserve(context)
    for tier, store in stores.items():
        try:
            store.write(layer, 0, context, slot)
            for tokens in (context // 8, context):
                took = [_seconds(lambda: store.read(layer, tokens, slot, None), adapter.device) for _ in range(repeats)]  # noqa: B023
                samples.append(SwapSample(tier, float(tokens * layer.token_bytes), statistics.median(took)))
        finally:
            store.close()
    return samples


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
