"""Tokens arrive in pieces and are taken back: what is stored depends on which tokens they are, not on how they came."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from vericache_conform.case import Case
from vericache_conform.check import check
from vericache_conform.outcome import Evidence, Failure
from vericache_conform.stored import attend, dense_rows, fingerprint, stored_layers, tensor_bytes
from vericache_conform.world import World
from vericache_core.coded import CodedLayer
from vericache_core.compressor import Compressor
from vericache_core.errors import VeriCacheError
from vericache_core.kv import CompressedKV


@check(
    "C-10",
    tier="contract",
    capability="extend",
    cost=2.0,
    rationale="How many tokens a verify accepts is chance. If it shows in the compressed bytes, two runs of one prompt draft "
    "differently and nothing can be reproduced or shared.",
    origin="VeloxQuant #86, #163; transformers #34189.",
    fix="Move boundaries by the number of tokens only (key_boundary, value_boundary); encode whole units, each by itself: a "
    "scale over all rows of a call makes later tokens change earlier codes.",
)
def chunks(case: Case) -> Evidence:
    """Extend by 1, 2, 7 or all tokens at a time gives the same bytes; for quantizers those of compressing all at once."""
    quantizes = case.subject.spec.kind == "quantization"

    def body(example: dict[str, Any]) -> None:
        options, start, total = example["options"], example["start"], example["total"]
        compressor = case.create(options)
        world = World(case.layers(options), total, case.seed)
        first = case.compress(compressor, world, start)
        expected = fingerprint(
            case.compress(compressor, world, total) if quantizes else _in_chunks(case, first, world, total, options)
        )
        for size in (1, 2, 7, total - start):
            if size == 1 and total - start > 90:
                continue
            if fingerprint(_in_chunks(case, first, world, size, options)) != expected:
                what = "compressing all at once" if quantizes else "extending at once"
                raise Failure(f"extending {start} tokens to {total} by {size} at a time gives other bytes than {what}")

    def examples() -> Iterator[dict[str, Any]]:
        for options in case.option_sets:
            far = max([16, *case.landmarks])
            for start, total in ((3, 40), (max(3, far - 3), far + 30), (case.length, case.length + far + 3)):
                yield {"options": options, "start": start, "total": total}

    return Evidence(case.for_each(examples(), body))


def _in_chunks(case: Case, first: CompressedKV, world: World, size: int, options: dict[str, Any]) -> CompressedKV:
    compressor = case.create(options)
    held = first
    while held.tokens < world.tokens:
        held = case.extend(compressor, held, world, min(world.tokens, held.tokens + size))
    return held


@check(
    "C-15",
    tier="contract",
    capability="rollback",
    cost=2.0,
    rationale="Rejected drafts are taken back many times per answer. One row too many or too few each time, and the drafts are "
    "about another text.",
    origin="mlx-vlm #1956 (a trim that did nothing); transformers' quantized cache crops only the residual.",
    fix="With `prefix`, re-create the boundaries of the shorter length from it; without, keep codes as they are. Refuse to "
    "take back more than there is.",
)
def rollback_restores(case: Case) -> Evidence:
    """Rollback with the prefix gives the bytes of a cache that never saw those tokens; too many are refused."""
    if case.subject.spec.capability("extend") == "no":
        raise Failure("rollback is declared without extend, so there is nothing to roll back")

    def body(example: dict[str, Any]) -> None:
        options, start, added = example["options"], example["start"], example["added"]
        compressor = case.create(options)
        world = World(case.layers(options), start + added, case.seed)
        first = case.compress(compressor, world, start)
        grown = case.extend(compressor, first, world, start + added)
        for back in sorted({0, 1, 2, 6, added // 2, added - 1, added} & set(range(added + 1))):
            left = start + added - back
            never = first if back == added else case.extend(compressor, first, world, left)
            exact = case.rollback(compressor, grown, back, world)
            if fingerprint(exact) != fingerprint(never):
                raise Failure(f"{start}+{added} tokens, {back} taken back: other bytes than if they had never come")
            rough = case.rollback(compressor, grown, back, None)
            if rough.tokens != left or any(layer.tokens != left for _, layer in stored_layers(rough)):
                raise Failure(f"{back} of {start + added} tokens taken back without a prefix leaves {rough.tokens}")
            again = case.extend(compressor, exact, world, start + added) if back else grown
            if fingerprint(again) != fingerprint(grown):
                raise Failure(f"{back} tokens taken back and appended again give other bytes")
        _refuses(compressor, grown)

    def examples() -> Iterator[dict[str, Any]]:
        for options in case.option_sets:
            for mark in (*case.landmarks[-2:], 40):
                yield {"options": options, "start": max(3, mark - 3), "added": 9}
            yield {"options": options, "start": case.length, "added": 2 * max([16, *case.landmarks]) % 301 + 5}

    return Evidence(case.for_each(examples(), body))


def _refuses(compressor: Compressor, grown: CompressedKV) -> None:
    """Taking back more than there is, or less than nothing, must be refused with a typed error."""
    for back in (grown.tokens + 1, -1):
        try:
            compressor.rollback(grown, back)
        except (VeriCacheError, ValueError):
            continue
        except Exception as error:
            raise Failure(f"rollback of {back} tokens raised {type(error).__name__} instead of a typed error") from error
        raise Failure(f"rollback of {back} of {grown.tokens} tokens was not refused")


@check(
    "C-19",
    tier="contract",
    capability="extend",
    cost=1.0,
    rationale="Codes that are decoded and encoded again at every append decay: norms shrink a little each time, and after a "
    "thousand tokens the drafts are worthless.",
    origin="A norm-storing codec in transformers' QuantizedLayer: 0.935 -> 0.541 after ten flushes.",
    fix="Append new codes after the old ones; never rewrite what is already encoded.",
)
def no_drift(case: Case) -> Evidence:
    """Over 20 appends what is already encoded keeps its bits."""

    def body(example: dict[str, Any]) -> None:
        options, step = example["options"], example["step"]
        compressor, start = case.create(options), case.length
        world = World(case.layers(options), start + 20 * step, case.seed)
        held = case.compress(compressor, world, start)
        for number in range(20):
            at = start + number * step
            grown = case.extend(compressor, held, world, at + step, at)
            for (index, old), (_, new) in zip(stored_layers(held), stored_layers(grown), strict=True):
                if not _continues(old, new):
                    raise Failure(
                        f"append {number + 1} of {step} tokens changed rows of layer {index} that were already encoded"
                    )
            held = grown
        worst, fresh = 0.0, case.create(options)
        once = case.extend(fresh, case.compress(fresh, world, start), world, world.tokens, start)
        for index, layer in stored_layers(held):
            query = world.queries[index][:, -3:].float() * world.layers[index].scaling
            whole = once.layers[index]
            assert whole is not None
            worst = max(worst, float((attend(layer, query) - attend(whole, query)).abs().max()))
        if worst > 1e-5:
            raise Failure(f"after 20 appends the answers differ by {worst:.2g} from those after one append")

    step = max(3, *[mark // 4 for mark in case.landmarks]) if case.landmarks else 3
    return Evidence(case.for_each([{"options": options, "step": min(step, 40)} for options in case.option_sets], body))


def _continues(old: Any, new: Any) -> bool:
    """Whether the encoded (or plain) rows of ``old`` are the first ones of ``new``, bit for bit."""
    if isinstance(old, CodedLayer) and isinstance(new, CodedLayer):
        return all(_same_codes(a, b) for a, b in ((old.keys, new.keys), (old.values, new.values)))
    before, after = dense_rows(old), dense_rows(new)
    if before is None or after is None:
        return True  # a form of its own: the comparison of answers below has to do
    return all(
        torch.equal(part, longer[: len(part)])
        for pair, others in zip(before, after, strict=True)
        for part, longer in zip(pair, others, strict=True)
    )


def _same_codes(old: Any, new: Any) -> bool:
    def joined(rows: Any) -> dict[str, torch.Tensor]:
        names = rows.segments[0].codes if rows.segments else {}
        return {name: torch.cat([segment.codes[name] for segment in rows.segments], 1) for name in names}

    first, second = joined(old), joined(new)
    return all(
        name in second and tensor_bytes(part) == tensor_bytes(second[name][:, : part.shape[1]]) for name, part in first.items()
    )
