"""Drafts: they really come from the compressed cache, at the right positions, over the right rows, and some are wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vericache_conform import models, reference
from vericache_conform.bench import Bench, Seen, greedy, spied
from vericache_conform.case import Case
from vericache_conform.check import check
from vericache_conform.mismatch import require_same
from vericache_conform.outcome import Evidence, Failure, Skip
from vericache_conform.stored import dense_rows, stored_layers, tensor_bytes

TOLERANCE = 1e-4
WINDOW = 6


def _first_window(case: Case, architecture: str) -> tuple[Bench, list[int], Any, Seen]:
    """A run of a few drafted tokens right after compression, and what was seen."""
    bench, seen = Bench(case, architecture), Seen()
    prompt = bench.prompt(bench.long)
    with bench.engine(seen=seen, window=WINDOW) as engine, spied(seen):
        got = bench.run(engine, prompt, greedy(WINDOW + 2))
    if got.error is not None or got.metrics.degraded:
        raise Failure(f"{architecture}: the run failed: {got.error or got.metrics.degraded[0]}")
    if len(seen.draft_tokens) < WINDOW or not seen.compressed:
        raise Failure(f"{architecture}: only {len(seen.draft_tokens)} tokens were drafted")
    return bench, prompt, got, seen


def _independent(bench: Bench, prompt: list[int], got: Any, seen: Seen) -> Tensor:
    """Logits of the drafted rows by an independent forward over what the compressor returned."""
    rows: dict[int, reference.Rows] = {}
    for index, layer in stored_layers(seen.compressed[0]):
        dense = dense_rows(layer)
        if dense is None:
            raise Skip(f"{type(layer).__name__} has no rows to compare with")
        rows[index] = dense
    ids = [*prompt, got.token_ids[0], *seen.draft_tokens[: WINDOW - 1]]
    return reference.drafted(bench.twin(), ids, len(prompt), rows)


def _compare(case: Case, architecture: str) -> float:
    bench, prompt, got, seen = _first_window(case, architecture)
    expected = _independent(bench, prompt, got, seen)
    drafts = torch.stack(seen.draft_logits[:WINDOW])
    if not bool(torch.isfinite(drafts).all()):
        raise Failure(f"{architecture}: logits of drafts are not finite")
    error = float((drafts - expected).abs().max() / expected.abs().max())
    if not error <= TOLERANCE:
        raise Failure(f"{architecture}: logits of drafts differ from an independent forward by {error:.2g} of the largest")
    return error


@check(
    "R-02",
    tier="runtime",
    cost=4.0,
    rationale="A drafted token sits at the logical position, however few rows survive. With learned positions a shift shows at "
    "once; with rotary ones it only ruins acceptance.",
    origin="VeloxQuant-MLX #137, #171, #389; hipfire #391; keys_values #140; TensorRT-LLM #15697.",
    fix="Keep logical lengths (C-17), and do not rotate keys or queries again.",
)
def logical_positions(case: Case) -> Evidence:
    """Drafts run at logical positions: those of a model with learned positions equal an independent forward."""

    def body(example: Mapping[str, Any]) -> None:
        bench, prompt, _, seen = _first_window(case, models.LLAMA)
        expected = list(range(len(prompt), len(prompt) + WINDOW))
        if seen.draft_positions[:WINDOW] != expected:
            raise Failure(f"drafts ran at positions {seen.draft_positions[:WINDOW]}, not {expected}")
        del bench
        try:
            case.note("worst_error", _compare(case, example["architecture"]))
        except Skip as skip:
            if not skip.declared:
                raise
            case.note("worst_error", _compare(case, "gpt-neox"))

    return Evidence(case.for_each([{"architecture": "gpt2"}], body))


@check(
    "R-03",
    tier="runtime",
    cost=6.0,
    rationale="What a drafted row sees must be the survivors and the tail. A mask built as if nothing had been dropped shows "
    "it other rows.",
    origin="VeloxQuant #370, #392.",
    fix="See C-18: fold every stored row once; return the map of exactly these rows. Where C-18 passes and a codec has a "
    "`layout`, it says something else than `decode`: kernels read codes by it.",
)
def mask_of_kept_rows(case: Case) -> Evidence:
    """Drafts see exactly the kept rows and the tail: their logits equal an independent masked forward."""
    worst = 0.0

    def body(example: Mapping[str, Any]) -> None:
        nonlocal worst
        worst = max(worst, _compare(case, example["architecture"]))

    tried = case.for_each([{"architecture": name} for name in (models.LLAMA, "phi3", "gemma3")], body)
    return Evidence(tried, {"worst_error": worst, "tolerance": TOLERANCE})


@check(
    "R-08",
    tier="runtime",
    cost=10.0,
    rationale="Identity is empty if nothing was compressed or nothing was drafted: a compressor that silently does nothing "
    "passes every comparison.",
    origin="Caches that are labelled with a method and hold plain rows; keys stored as fp16 and billed as 2 bits.",
    fix="Check that compress is reached for the layers you support, and that its result is smaller than the rows.",
)
def not_vacuous(case: Case) -> Evidence:
    """Bytes really fell, drafts were proposed, some were rejected; acceptance is reported."""
    points: list[dict[str, Any]] = []
    totals = {"drafted": 0, "accepted": 0}
    facts: dict[str, Any] = {}

    def body(example: Mapping[str, Any]) -> None:
        bench = Bench(case, example["architecture"])
        drafted = accepted = 0
        share = 0.0
        for number in range(2):
            prompt = bench.prompt(bench.long, number)
            expected = bench.plain(prompt, greedy(40))
            with bench.engine(example["options"]) as engine:
                got = bench.run(engine, prompt, greedy(40))
            require_same(expected, got, "the run")
            metrics = got.metrics
            if not 0 < metrics.compressed_kv_bytes < metrics.compressed_from_bytes:
                raise Failure(
                    f"{metrics.compressed_kv_bytes} bytes are held for {metrics.compressed_from_bytes} bytes of full KV"
                )
            if not metrics.drafted:
                raise Failure("nothing was drafted")
            share = metrics.compressed_kv_bytes / metrics.compressed_from_bytes
            drafted, accepted = drafted + metrics.drafted, accepted + metrics.accepted
            facts.update(_rounds(metrics, expected))
        totals["drafted"] += drafted
        totals["accepted"] += accepted
        points.append(
            {"options": example["options"], "bytes_share": round(share, 4), "acceptance": round(accepted / drafted, 4)}
        )

    examples = [{"architecture": models.LLAMA, "options": options} for options in case.option_sets[:4]]
    tried = case.for_each(examples, body)
    if totals["accepted"] == totals["drafted"]:
        raise Failure(f"all {totals['drafted']} drafts were accepted on a model where what is dropped matters")
    first = points[0]
    measured = {"acceptance": first["acceptance"], "bytes_share": first["bytes_share"], "points": points}
    return Evidence(tried, {**totals, **measured, **facts})


def _rounds(metrics: Any, plain: Any) -> dict[str, Any]:
    """What the plots show: rounds, acceptance by position, and margins where drafts were rejected."""
    pairs = list(zip(metrics.drafted_per_round, metrics.accepted_per_round, strict=True))
    longest = max((drafted for drafted, _ in pairs), default=0)
    by_position = []
    for position in range(longest):
        reached = [accepted for drafted, accepted in pairs if drafted > position]
        by_position.append(round(sum(accepted > position for accepted in reached) / max(1, len(reached)), 4))
    rejected, at = [], 1
    for drafted, accepted in pairs:
        at += accepted
        if accepted < drafted and at < len(plain.logits):
            top = torch.topk(plain.logits[at].float(), 2).values
            rejected.append(float(top[0] - top[1]))
        at += 1
    bounds = (0.01, 0.1, 0.3, 1.0, 3.0)
    counts = [sum(low <= m < high for m in rejected) for low, high in zip((0.0, *bounds), (*bounds, float("inf")), strict=True)]
    return {
        "drafted_per_round": list(metrics.drafted_per_round),
        "accepted_per_round": list(metrics.accepted_per_round),
        "acceptance_by_position": by_position,
        "margin_histogram": {"labels": ["<0.01", "<0.1", "<0.3", "<1", "<3", ">=3"], "counts": counts},
    }


@check(
    "R-13",
    tier="runtime",
    cost=6.0,
    rationale="Drafts from the full cache would be fast nowhere and prove nothing. Only poison shows which cache is read.",
    origin="Hosts that merge caches and hand a plain one to the model under the method's name.",
    fix="Attend to what `tensors()` lists, and to nothing else.",
)
def poison(case: Case) -> Evidence:
    """Poisoning the full cache while drafting changes no draft; poisoning the compressed one does."""
    bench = Bench(case)
    prompt, params = bench.prompt(bench.long), greedy(WINDOW + 2)
    expected = bench.plain(prompt, params)

    def run(target: str | None) -> Seen:
        seen = Seen()
        with bench.engine(seen=seen, window=WINDOW, full_kv="device") as engine, spied(seen), _poisoned(target):
            got = bench.run(engine, prompt, params)
        require_same(expected, got, "a run without poison" if target is None else f"with the {target} cache poisoned")
        return seen

    def body(example: Mapping[str, Any]) -> None:
        clean, dirty = run(None), run(example["cache"])
        pairs = list(zip(clean.draft_logits[:WINDOW], dirty.draft_logits[:WINDOW], strict=True))
        same = all(tensor_bytes(one) == tensor_bytes(other) for one, other in pairs)
        if example["cache"] == "full" and not same:
            raise Failure("drafts changed when the full cache was poisoned: they read it")
        if example["cache"] == "compressed" and same:
            raise Failure("drafts did not change when the compressed cache was poisoned: they do not read it")

    return Evidence(case.for_each([{"cache": "full"}, {"cache": "compressed"}], body))


@contextmanager
def _poisoned(target: str | None) -> Iterator[None]:
    """Fill one of the two caches with nonsense during each draft step, and put it back afterwards."""
    from vericache_core.runtime.loop import StepLoop  # slow to import, see bench

    original = StepLoop._forward  # noqa: SLF001  # a test looks inside

    def forward(loop: StepLoop, segments: Any, observe: Any) -> Any:
        if target is None or any(segment.want.phase != "draft" for segment in segments):
            return original(loop, segments, observe)
        tensors = [part for segment in segments for part in _parts(segment.request, target)]
        kept = [part.clone() for part in tensors]
        with torch.inference_mode():
            for part in tensors:
                part.copy_(_nonsense(part))
            try:
                return original(loop, segments, observe)
            finally:
                for part, old in zip(tensors, kept, strict=True):
                    part.copy_(old)

    StepLoop._forward = forward  # type: ignore[assignment,method-assign]  # noqa: SLF001
    try:
        yield
    finally:
        StepLoop._forward = original  # type: ignore[method-assign]  # noqa: SLF001


def _parts(request: Any, target: str) -> list[Tensor]:
    draft = request.draft
    if target == "full":
        pages = [request.full.device_pages(index) for index in draft.compressed_layers()]
        return [part for page in pages for part in _extents(page)]
    found: list[Tensor] = []
    for index in draft.compressed_layers():
        pages, _, prefix = draft.layer(index)
        if prefix is None:
            kept = min(draft.current().layers[index].surviving.counts)
            found += [part[..., :kept, :] if values else part[..., :kept] for part, values in _first_page(pages)]
        else:
            found += list(prefix.tensors().values())
    return found


def _extents(pages: Any) -> list[Tensor]:
    held = [extent for _, extent in pages._extents if extent is not None]  # noqa: SLF001
    return [part for extent in held for part in (extent.keys, extent.values)]


def _first_page(pages: Any) -> list[tuple[Tensor, bool]]:
    keys, values = pages.page(0)
    return [(keys, False), (values, True)]


def _nonsense(part: Tensor) -> Tensor:
    if part.is_floating_point():
        draw = torch.Generator().manual_seed(part.numel())
        return (torch.randn(part.shape, generator=draw) * 3).to(part.dtype)
    return part.flip(-1).bitwise_not() if part.dtype == torch.uint8 else part.flip(-1)
