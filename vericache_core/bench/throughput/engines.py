"""Our own engine as a system: plain, with a compressor, with a window and mode of its own choice, or lossy."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vericache_core.bench.runs import KeptKV
from vericache_core.bench.throughput.held import Decoded, HeldEngine, Link
from vericache_core.bench.throughput.measured import Measured, Trace, Unavailable
from vericache_core.bench.throughput.workloads import Prompt, Workload
from vericache_core.cache.pages import PAGE, pages_for
from vericache_core.config import EngineConfig, replace
from vericache_core.errors import ConfigError
from vericache_core.plugins.registry import Registry
from vericache_core.runtime.request import Request

Tell = Callable[[str], None]


class Shop:
    """One loaded model, and what engines over it share: prefilled prompts and the speed of memory.

    Args:
        model, tokenizer: loaded once; engines share the weights.
        config: of every engine, before a system's own changes.
        registry: compressors.
        tell: hears what takes long.
    """

    def __init__(self, model: Any, tokenizer: Any, config: EngineConfig, registry: Registry, tell: Tell) -> None:
        self.model, self.tokenizer, self.config, self.registry, self.tell = model, tokenizer, config, registry, tell
        self.prefill_seconds: dict[tuple[int, ...], float] = {}
        self._sources: dict[tuple[int, ...], KeptKV] = {}
        self._engine: HeldEngine | None = None
        self._bandwidth: float | None = None

    def engine(self, changes: Mapping[str, Any], link: Link) -> HeldEngine:
        """An engine over the shared weights.

        Raises:
            ConfigError: the engine does not know or does not take one of ``changes``.
        """
        return HeldEngine(self.model, self.tokenizer, replace(self.config, **changes), self.registry, link)

    def plain_engine(self) -> HeldEngine:
        if self._engine is None:
            self._engine = self.engine({"compressor": None}, Link())
        return self._engine

    def sources(self, workload: Workload) -> dict[tuple[int, ...], KeptKV]:
        """Rows of the prompts, each prefilled once; those of other workloads are given back."""
        wanted = {prompt.token_ids: prompt for prompt in workload.prompts}
        for ids in set(self._sources) - set(wanted):
            self._sources.pop(ids).free()
        for number, (ids, prompt) in enumerate(wanted.items()):
            if ids not in self._sources:
                self.tell(f"{workload.name}: prefill of request {number + 1} of {len(wanted)}, {len(ids)} tokens")
                started = time.perf_counter()
                self._sources[ids] = self.plain_engine().prefill(prompt)
                self.prefill_seconds[ids] = time.perf_counter() - started
        return self._sources

    def memory_bandwidth(self) -> float:
        """Bytes a second that one thread copies, read and written bytes both counted; best of five."""
        if self._bandwidth is None:
            source = np.ones(1 << 26, dtype=np.uint8)
            target = np.empty_like(source)
            times = []
            for _ in range(5):
                started = time.perf_counter()
                np.copyto(target, source)
                times.append(time.perf_counter() - started)
            self._bandwidth = 2 * source.nbytes / min(times)
        return self._bandwidth

    def token_bytes(self) -> int:
        """Bytes of full KV of one token, all layers."""
        return sum(layer.token_bytes for layer in self.plain_engine().adapter.layers)

    def budget(self, workload: Workload) -> int | None:
        """The workload's cap on device KV in bytes."""
        if workload.budget_share is None:
            return None
        tokens = sum(len(prompt.token_ids) + workload.new_tokens for prompt in workload.prompts)
        return int(workload.budget_share * tokens * self.token_bytes())

    def close(self) -> None:
        for source in self._sources.values():
            source.free()
        self._sources.clear()
        if self._engine is not None:
            self._engine.close()
            self._engine = None


@dataclass
class EngineSystem:
    """The engine under some settings.

    Args:
        shop: shared weights and prefixes.
        name: for the table.
        changes: fields of EngineConfig that make this system.
        lossy: take the drafts for the output and never verify.
    """

    shop: Shop
    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    lossy: bool = False

    def __post_init__(self) -> None:
        self._engine: HeldEngine | None = None
        self._built: dict[str, Any] = {}
        self._link = Link()

    @property
    def lossless(self) -> bool:
        return not self.lossy

    def prepare(self, workload: Workload) -> None:
        changes = dict(self.changes)
        if workload.tier is not None and changes.get("compressor") is not None:
            changes["full_kv"] = workload.tier
        changes["device_budget"] = self.shop.budget(workload)
        try:
            if self._engine is None or changes != self._built:
                self.close()
                self._engine, self._built = self.shop.engine(changes, self._link), changes
        except ConfigError as error:
            raise Unavailable(f"the engine does not take it: {error.message.removeprefix('replace(): ')}") from error
        self._link.bytes_per_second = None
        if workload.slowdown is not None:
            self._link.bytes_per_second = self.shop.memory_bandwidth() / workload.slowdown
        self.shop.sources(workload)

    def run(self, workload: Workload) -> Measured:
        engine = self._engine
        assert engine is not None
        budget = self.shop.budget(workload)
        tokens: list[list[int]] = []
        waves: list[Decoded] = []
        hidden: list[tuple[float, float]] = []
        totals = {"swap_bytes": 0, "drafted": 0, "accepted": 0}
        compress, notes, modes = 0.0, list[str](), list[str]()
        waiting = list(workload.prompts)
        while waiting:
            requests = self._wave(engine, workload, waiting, budget)
            try:
                before = [request.full.moved_bytes + request.metrics.swap_bytes for request in requests]
                waves.append(engine.draft_only(requests) if self.lossy else engine.decode(requests))
                tokens += [[*request.generated, *(request.drafts if self.lossy else ())] for request in requests]
                for request, moved in zip(requests, before, strict=True):
                    metrics = request.metrics
                    # A finished request has its bytes in its metrics, one that was stopped still in its cache.
                    done = metrics.swap_bytes + (0 if request.finished else request.full.moved_bytes)
                    totals["swap_bytes"] += done - moved
                    totals["drafted"] += metrics.drafted
                    totals["accepted"] += metrics.accepted
                    compress += metrics.seconds.get("compress", 0.0)
                    notes += metrics.degraded
                    modes.append(metrics.mode)
            finally:
                for request in requests:
                    engine.drop(request)
            share = self._link.hidden_fraction()
            if share is not None:
                hidden.append((share, sum(end - start for start, end, _ in self._link.swaps)))
        peak = max(wave.peak_device_bytes for wave in waves)
        swap_seconds = sum(seconds for _, seconds in hidden)
        if self.changes.get("mode") == "auto":
            notes.append("modes: " + ", ".join(f"{count} {mode}" for mode, count in sorted(Counter(modes).items())))
        if self.lossy:
            notes.append("drafts without verify: the first token is the full KV's, all others the compressed KV's")
        if len(waves) > 1:
            notes.append(f"{len(waves)} waves, so that device KV stays below its cap")
        return Measured(
            tokens=tokens,
            decoded=sum(wave.tokens for wave in waves),
            decode_seconds=sum(wave.seconds for wave in waves),
            prefill_seconds=sum(self.shop.prefill_seconds[prompt.token_ids] for prompt in workload.prompts),
            compress_seconds=compress,
            peak_device_kv_bytes=peak,
            swap_seconds=swap_seconds,
            swap_hidden_fraction=sum(share * seconds for share, seconds in hidden) / swap_seconds if hidden else None,
            steps=sum(wave.steps for wave in waves),
            within_budget=None if budget is None else peak <= budget,
            notes=notes,
            trace=_joined(waves),
            **totals,
        )

    def _wave(self, engine: HeldEngine, workload: Workload, waiting: list[Prompt], budget: int | None) -> list[Request]:
        """Take from ``waiting`` as many requests as fit below the cap together, but at least one."""
        sources, compressor = self.shop.sources(workload), self.changes.get("compressor")
        requests: list[Request] = []
        try:
            while waiting:
                prompt = waiting[0]
                request = engine.start(prompt, workload.new_tokens, compressor, sources[prompt.token_ids])
                requests.append(request)
                if budget is not None and len(requests) > 1 and _need(engine, requests) > budget:
                    engine.drop(requests.pop())
                    break
                waiting.pop(0)
        except BaseException:
            for request in requests:
                engine.drop(request)
            raise
        return requests

    def release(self) -> None:
        """The engine stays: building one proves row invariance and may calibrate."""

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def _need(engine: HeldEngine, requests: list[Request]) -> int:
    """Most device bytes that the requests will hold: now, plus their tails in whole pages, plus one's ring slots."""
    layers, need = engine.adapter.layers, 0
    for request in requests:
        need += request.device_bytes()
        if request.draft is not None:
            need += PAGE * pages_for(request.params.max_new_tokens) * sum(layers[i].token_bytes for i in request.full.offloaded)
    slot = max(
        (layers[i].token_bytes * (r.full.tokens + r.params.max_new_tokens) for r in requests for i in r.full.offloaded),
        default=0,
    )
    return need + engine.config.ring_layers * slot


def _joined(waves: list[Decoded]) -> Trace:
    """Traces of waves one after the other; requests keep counting."""
    joined, start, first = Trace(), 0.0, 0
    for wave in waves:
        trace = wave.trace
        joined.phases.extend((a + start, b + start, number + first, phase) for a, b, number, phase in trace.phases)
        joined.swaps.extend((a + start, b + start, number + first) for a, b, number in trace.swaps)
        joined.windows.extend((at + start, number + first, d, a) for at, number, d, a in trace.windows)
        joined.memory.extend((at + start, device, host, disk) for at, device, host, disk in trace.memory)
        start += wave.seconds
        first += 1 + max((number for _, _, number, _ in trace.phases), default=-1)
    return joined
