"""The table of compressors: what each keeps, how far its drafts get, and that the output stays what it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vericache_core.bench.answers import parses
from vericache_core.bench.drafts import BLOCK, Drafts, accepted_mean, accepted_runs, divergence, hazard
from vericache_core.bench.prompts import BenchPrompt
from vericache_core.bench.runs import (
    KeptKV,
    Memo,
    Tell,
    copy_prefix,
    empty_kv,
    generated_rows,
    new_request,
    run_all,
)
from vericache_core.cache.draft import DraftKV
from vericache_core.engine import Engine
from vericache_core.kv import CompressedKV
from vericache_core.model.prompts import ending_ids
from vericache_core.plugins.registry import Registry
from vericache_core.runtime.request import Request

WINDOWS = (4, 8, 16, BLOCK)


@dataclass(frozen=True)
class Setting:
    """A compressor and its options."""

    compressor: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.compressor + ("" if not self.options else " " + ", ".join(f"{k}={v}" for k, v in self.options.items()))


@dataclass(frozen=True)
class Row:
    """One compressor setting on one prompt; ``None`` where a figure could not be had.

    Attributes:
        keep_bytes_fraction: bytes of the compressed prefix over those of the full KV it stands for.
        accepted_mean: by window, mean number of drafts accepted before the first rejection.
        hazard: chance per draft of being the first wrong one; ``hazard_by_window`` counts the first drafts only.
        kl_nats: mean KL(full || lossy) per drafted token.
        first_divergence: index of the first generated token in which decoding with the compressed KV alone differs
            from the full KV; ``None`` when it never does.
        full_parses, lossy_parses: whether the two outputs parse, where the prompt asks for a grammar.
        compress_seconds, prefill_seconds: time of compression and of the prefill of the same prompt.
        identical: tokens and logits of a real run with this compressor equal those of plain decoding, bit for bit.
        new_tokens: tokens that the full KV generated.
        error: why there are no figures.
    """

    compressor: str
    options: Mapping[str, Any]
    prompt: str
    prompt_tokens: int
    new_tokens: int
    keep_bytes_fraction: float | None = None
    accepted_mean: Mapping[int, float | None] = field(default_factory=dict)
    hazard: float | None = None
    hazard_by_window: Mapping[int, float | None] = field(default_factory=dict)
    kl_nats: float | None = None
    first_divergence: int | None = None
    full_parses: bool | None = None
    lossy_parses: bool | None = None
    compress_seconds: float | None = None
    prefill_seconds: float | None = None
    identical: bool | None = None
    error: str | None = None


def bench_compressors(
    engine: Engine,
    registry: Registry,
    settings: Sequence[Setting],
    prompts: Sequence[BenchPrompt],
    new_tokens: int,
    tell: Tell = lambda _: None,
    have: Callable[[Setting, BenchPrompt], bool] = lambda *_: False,
) -> Iterator[Row]:
    """Measure every setting on every prompt; rows come prompt by prompt.

    ``tell`` hears where the measurement stands, often. Rows that are there already, as ``have`` says, are left out.

    Raises:
        UsageError: a setting that cannot be built.
    """
    for setting in settings:
        registry.create(setting.compressor, setting.options)
    for prompt in prompts:
        missing = [setting for setting in settings if not have(setting, prompt)]
        if missing:
            yield from _bench_prompt(engine, registry, missing, prompt, new_tokens, tell)


def _bench_prompt(
    engine: Engine, registry: Registry, settings: Sequence[Setting], prompt: BenchPrompt, new_tokens: int, tell: Tell
) -> Iterator[Row]:
    length = len(prompt.token_ids)
    full = empty_kv(engine, None, length + new_tokens, KeptKV)
    assert isinstance(full, KeptKV)
    try:
        plain = new_request(engine, prompt, new_tokens, None, full)
        run_all(engine, [plain], lambda at: tell(f"{prompt.name}: full KV: {at}"))
        if plain.error is not None:
            raise plain.error
        rows = generated_rows(full, length)
        full.rollback(full.tokens - length)
        drafts = Drafts(engine, new_request(engine, prompt, new_tokens, None, full), plain.generated, rows)
        compressors = [Memo(registry.create(setting.compressor, setting.options)) for setting in settings]
        requests = [_after_prefill(engine, prompt, new_tokens, memo, full) for memo in compressors]
        run_all(engine, requests, lambda at: tell(f"{prompt.name}: {len(requests)} settings: {at}"))
        for setting, memo, request in zip(settings, compressors, requests, strict=True):
            tell(f"{prompt.name}: drafts of {setting}")
            yield _row(engine, prompt, setting, memo.made, request, plain, drafts)
            memo.made = None  # the largest thing here; the next one needs the room
    finally:
        full.free()


def _after_prefill(engine: Engine, prompt: BenchPrompt, new_tokens: int, memo: Memo, source: KeptKV) -> Request:
    """A request whose prompt is in its full KV but for the rows that the compressor has to see."""
    full = empty_kv(engine, memo, len(prompt.token_ids) + new_tokens)
    needs = memo.needs
    if not needs.attention_mass:
        copy_prefix(source, full, len(prompt.token_ids) - max(1, needs.queries))
    return new_request(engine, prompt, new_tokens, memo, full)


def _row(
    engine: Engine,
    prompt: BenchPrompt,
    setting: Setting,
    made: CompressedKV | None,
    request: Request,
    plain: Request,
    drafts: Drafts,
) -> Row:
    metrics = request.metrics
    facts: dict[str, Any] = {
        "compressor": setting.compressor,
        "options": dict(setting.options),
        "prompt": prompt.name,
        "prompt_tokens": len(prompt.token_ids),
        "new_tokens": len(plain.generated),
        "prefill_seconds": plain.metrics.seconds.get("prefill"),
        "compress_seconds": metrics.seconds.get("compress"),
        "identical": _identical(request, plain),
    }
    if made is None or metrics.degraded or request.error is not None:
        return Row(**facts, error=str(request.error or "; ".join(metrics.degraded) or "nothing was compressed"))
    layers = [index for index, layer in enumerate(made.layers) if layer is not None]
    if not layers:
        return Row(**facts, error="the model has no layer that can be compressed")
    full, length = drafts.request.full, len(prompt.token_ids)
    try:
        draft = DraftKV.build(full, made, layers)
        different, first = drafts.first_difference(draft)
        # Only a grammar needs to see the end of the lossy output.
        ends = ending_ids(engine.adapter.model, engine.tokenizer)
        lossy = [] if prompt.grammar is None else drafts.free(draft, different, ends)
        blocks = drafts.along(draft, first)
    finally:
        full.rollback(full.tokens - length)
    runs = accepted_runs(blocks, plain.generated)
    assert plain.logits is not None
    return Row(
        **facts,
        keep_bytes_fraction=metrics.compressed_kv_bytes / metrics.compressed_from_bytes,
        accepted_mean={window: accepted_mean(runs, window) for window in WINDOWS},
        hazard=hazard(runs),
        hazard_by_window={window: hazard(runs, window) for window in WINDOWS},
        kl_nats=divergence(blocks, torch.stack(plain.logits)),
        first_divergence=different,
        full_parses=_parses(engine, prompt, plain.generated),
        lossy_parses=_parses(engine, prompt, lossy),
    )


def _identical(request: Request, plain: Request) -> bool:
    if list(request.generated) != list(plain.generated) or request.output.finish_reason != plain.output.finish_reason:
        return False
    assert request.logits is not None
    assert plain.logits is not None
    ours, theirs = (torch.stack(logits).view(torch.uint8) for logits in (request.logits, plain.logits))
    return torch.equal(ours, theirs)


def _parses(engine: Engine, prompt: BenchPrompt, tokens: Sequence[int]) -> bool | None:
    if engine.tokenizer is None or prompt.grammar is None:
        return None
    whole = bool(tokens) and tokens[-1] in ending_ids(engine.adapter.model, engine.tokenizer)
    return parses(engine.tokenizer.decode(list(tokens), skip_special_tokens=True), prompt.grammar, whole)
