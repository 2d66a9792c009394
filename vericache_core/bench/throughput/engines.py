"""Our own engine as a system: plain, with a compressor, with a window and mode of its own choice, or lossy."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vericache_core.bench.runs import KeptKV
from vericache_core.bench.throughput.held import HeldEngine
from vericache_core.bench.throughput.measured import Measured, Trace, Unavailable
from vericache_core.bench.throughput.workloads import Workload
from vericache_core.config import EngineConfig, replace
from vericache_core.errors import ConfigError
from vericache_core.model.load import load_model
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
        self._assistant: tuple[Any, Any] | None = None

    def engine(self, changes: Mapping[str, Any]) -> HeldEngine:
        """An engine over the shared weights.

        Raises:
            ConfigError: the engine does not know or does not take one of ``changes``.
        """
        config = replace(self.config, **changes)
        if config.proposer == "assistant" and config.assistant is not None and self._assistant is None:
            weights = next(self.model.parameters())
            self._assistant = load_model(config.assistant, weights.dtype, str(weights.device))
        return HeldEngine(self.model, self.tokenizer, config, self.registry, self._assistant)

    def plain_engine(self) -> HeldEngine:
        if self._engine is None:
            self._engine = self.engine({"compressor": None, "proposer": "none"})
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

    @property
    def lossless(self) -> bool:
        return not self.lossy

    def prepare(self, workload: Workload) -> None:
        changes = dict(self.changes)
        if workload.tier is not None and changes.get("compressor") is not None:
            changes["full_kv"] = workload.tier
            if workload.slowdown is not None:
                changes["link_bytes_per_s"] = self.shop.memory_bandwidth() / workload.slowdown
        changes["device_budget"] = self.shop.budget(workload)
        try:
            if self._engine is None or changes != self._built:
                self.close()
                self._engine, self._built = self.shop.engine(changes), changes
        except ConfigError as error:
            raise Unavailable(f"the engine does not take it: {error.message.removeprefix('replace(): ')}") from error
        self.shop.sources(workload)

    def run(self, workload: Workload) -> Measured:
        engine = self._engine
        assert engine is not None
        budget = self.shop.budget(workload)
        sources, compressor = self.shop.sources(workload), self.changes.get("compressor")
        company = len(workload.prompts)
        requests: list[Request] = []
        before: dict[int, int] = {}

        def begin(request: Request) -> None:
            engine.begin(request, sources[tuple(request.tokens[: request.prompt_tokens])])
            before[request.number] = request.full.moved_bytes + request.metrics.swap_bytes

        try:
            requests.extend(engine.build(prompt, workload.new_tokens, compressor, company) for prompt in workload.prompts)
            if self.lossy:
                self._check_room(engine, requests)
                for request in requests:
                    begin(request)
                found = engine.draft_only(requests)
            else:
                found = engine.decode(requests, begin)
            moved = 0
            for request in requests:
                # A finished request has its bytes in its metrics, one that was stopped still in its cache.
                done = request.metrics.swap_bytes + (0 if request.finished else request.full.moved_bytes)
                moved += done - before[request.number]
            tokens = [[*request.generated, *(request.drafts if self.lossy else ())] for request in requests]
        finally:
            for request in requests:
                engine.drop(request)
        metrics = [request.metrics for request in requests]
        notes = [note for each in metrics for note in each.degraded]
        if self.changes.get("mode") == "auto":
            counts = Counter(each.mode for each in metrics)
            notes.append("modes: " + ", ".join(f"{count} {mode}" for mode, count in sorted(counts.items())))
        if self.lossy:
            notes.append("drafts without verify: the first token is the full KV's, all others the compressed KV's")
        most = _most_at_a_time(found.trace)
        if not self.lossy and most < company:
            notes.append(f"at most {most} requests at a time, so that device KV stays below its cap")
        return Measured(
            tokens=tokens,
            decoded=found.tokens,
            decode_seconds=found.seconds,
            prefill_seconds=sum(self.shop.prefill_seconds[prompt.token_ids] for prompt in workload.prompts),
            compress_seconds=sum(each.seconds.get("compress", 0.0) for each in metrics),
            peak_device_kv_bytes=found.peak_device_bytes,
            peak_transient_bytes=found.ring.nbytes,
            transient_layers_per_request=found.ring.layers,
            swap_bytes=moved,
            swap_seconds=found.swap_seconds,
            swap_hidden_fraction=found.hidden_fraction,
            drafted=sum(each.drafted for each in metrics),
            accepted=sum(each.accepted for each in metrics),
            steps=found.steps,
            device_budget_bytes=budget,
            within_budget=None if budget is None else found.peak_device_bytes <= budget,
            notes=notes,
            trace=found.trace,
        )

    def _check_room(self, engine: HeldEngine, requests: Sequence[Request]) -> None:
        """Drafts that nobody verifies are not scheduled, so all requests must fit at once."""
        if not all(engine.fits(request, requests[:number]) for number, request in enumerate(requests)):
            raise Unavailable("lossy requests do not fit below the cap together")

    def release(self) -> None:
        """The engine stays: building one proves row invariance and may calibrate."""

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def _most_at_a_time(trace: Trace) -> int:
    """Most requests between their first step and their last."""
    ends: dict[int, tuple[float, float]] = {}
    for start, end, number, _ in trace.phases:
        first, last = ends.get(number, (start, end))
        ends[number] = min(first, start), max(last, end)
    return max((sum(first <= at < last for first, last in ends.values()) for at, _ in ends.values()), default=0)
