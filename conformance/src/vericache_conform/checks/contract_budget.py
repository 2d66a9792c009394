"""How much is kept, and what must be kept whatever its score."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from vericache_conform.case import Case, named_values
from vericache_conform.check import check
from vericache_conform.outcome import Evidence, Failure
from vericache_conform.stored import dense_rows, stored_layers
from vericache_conform.world import World
from vericache_core.plugins.fields import option_fields
from vericache_core.plugins.options import kept_tokens


@check(
    "C-03",
    tier="contract",
    kinds=["token-drop", "hybrid"],
    cost=1.5,
    rationale="The system prompt, attention sinks and the newest tokens carry the format of the answer; losing them to a tie "
    "or to one huge score ruins drafts on exactly the inputs where scores are flat.",
    origin="kvpress #227; KVzip presses evict the whole chat template beyond four sinks.",
    fix="Give protected positions the score +inf (TokenDropCompressor does it with `protected`) rather than a number that is "
    "larger than most scores. Options called `window` and `sinks` promise the newest and the first tokens.",
)
def protected_positions(case: Case) -> Evidence:
    """Protected spans, the window and the sinks survive, with tied and with very large scores too."""

    def body(example: dict[str, Any]) -> None:
        compressor = case.create(example["options"])
        layers = case.layers(example["options"], dtype=example["dtype"])
        tokens = example["tokens"]
        world = World(layers, tokens, case.seed, example["flavour"])
        spans = [(a, b) for a, b in example["spans"] if b <= tokens]
        compressed = case.compress(compressor, world, tokens, spans)
        built = case.promises(compressor)
        must = torch.zeros(tokens, dtype=torch.bool)
        for start, stop in spans:
            must[start:stop] = True
        names = named_values(built)
        budget = built.kept_tokens(tokens) if hasattr(built, "kept_tokens") else tokens
        if "window" in names:
            must[max(0, tokens - min(built.window, budget)) :] = True
        if "sinks" in names:
            must[: min(built.sinks, budget)] = True
        for index, layer in stored_layers(compressed):
            for head in range(layer.surviving.kv_heads):
                kept = torch.zeros(tokens, dtype=torch.bool)
                kept[layer.surviving.head(head)] = True
                lost = torch.nonzero(must & ~kept).flatten()
                if len(lost):
                    first = int(lost[0])
                    raise Failure(f"layer {index}, head {head}: {len(lost)} protected tokens are gone, the first at {first}")

    examples = [
        {"options": options, "dtype": dtype, "flavour": flavour, "tokens": tokens, "spans": spans}
        for options in case.option_sets
        for dtype, flavour in (("float32", "normal"), ("bfloat16", "ties"), ("bfloat16", "large"), ("float16", "large"))
        for tokens, spans in ((case.length, [(0, 5), (20, 31)]), (61, [(0, 61)]))
    ]
    return Evidence(case.for_each(examples, body))


@check(
    "C-04",
    tier="contract",
    kinds=["token-drop"],
    cost=1.5,
    rationale="A budget is what the user pays for. A float rounding turns `keep=0.9` of ten into eight or none, and an emptied "
    "cache drafts nonsense.",
    origin="kvpress #264: contexts were silently emptied; int(100 * (1 - 0.9)) is 9.",
    fix="Take the count from `options.kept_tokens(tokens)` (Budget computes it with integers); budgets that differ by layer or "
    "head must add up to it exactly.",
)
def kept_count(case: Case) -> Evidence:
    """The kept count is the integer formula, never zero; a budget of everything keeps everything."""
    fields = option_fields(case.subject.spec.options)
    budgets: list[dict[str, Any]] = []
    if "keep" in fields:
        budgets += [{"keep": keep} for keep in (0.01, 0.1, 0.3, 0.5, 0.9, 1.0)]
    if "keep_tokens" in fields:
        budgets += [{"keep_tokens": count} for count in (1, 7, 100, 100_000)]
    budgets = [budget for budget in budgets if not set(budget) & set(case.subject.options)] or [{}]

    def examples() -> Iterator[dict[str, Any]]:
        for options in case.option_sets:
            rest = {key: value for key, value in options.items() if key not in ("keep", "keep_tokens")}
            for budget in budgets:
                for tokens in (9, 10, 100, case.length):
                    yield {"options": {**rest, **budget}, "tokens": tokens}

    return Evidence(case.for_each(examples(), lambda example: _budget_is_kept(case, example)))


def _budget_is_kept(case: Case, example: dict[str, Any]) -> None:
    compressor = case.create(example["options"])
    layers, tokens = case.layers(example["options"]), example["tokens"]
    compressed = case.compress(compressor, World(layers, tokens, case.seed), tokens)
    built: Any = getattr(compressor, "options", None)
    expected = built.kept_tokens(tokens) if hasattr(built, "kept_tokens") else None
    for name in ("keep", "keep_tokens"):
        if expected is not None and name in example["options"]:
            by_rule = kept_tokens(tokens, **{name: example["options"][name]})
            if by_rule != expected:
                raise Failure(f"options.kept_tokens({tokens}) is {expected}, the rule of budgets gives {by_rule}")
    total, heads = 0, 0
    for index, layer in stored_layers(compressed):
        counts = layer.surviving.counts
        total, heads = total + sum(counts), heads + len(counts)
        if min(counts) < 1:
            raise Failure(f"layer {index} keeps nothing of {tokens} tokens in a KV head")
        if expected == tokens and set(counts) != {tokens}:
            raise Failure(f"layer {index} keeps {counts} of {tokens} tokens, though the budget covers all")
    if expected is not None and total != heads * expected:
        raise Failure(f"{total} rows are kept in {heads} KV heads, the budget is {expected} each, {heads * expected} in all")


@check(
    "C-27",
    tier="contract",
    cost=1.0,
    rationale="A model in bfloat16 has a cache in bfloat16. Rows in another dtype cost twice the bytes, or are read as other "
    "numbers altogether.",
    origin="A float16 cache on a bfloat16 model: fluent nonsense, no error, no NaN.",
    fix="Score in float32, store in the dtype of the rows you were given.",
)
def dtypes(case: Case) -> Evidence:
    """fp32, bf16 and fp16 caches are taken; rows that are kept exact keep their dtype."""

    def body(example: dict[str, Any]) -> None:
        compressor = case.create(example["options"])
        layers = case.layers(example["options"], dtype=example["dtype"])
        world = World(layers, case.length, case.seed)
        compressed = case.compress(compressor, world, case.length)
        for index, layer in stored_layers(compressed):
            tensors = layer.tensors()
            exact = [name for name in tensors if name in ("keys", "values") or name.endswith(".exact")]
            for name in exact:
                if tensors[name].dtype != layers[index].dtype:
                    raise Failure(f"layer {index}: {name} are {tensors[name].dtype}, the cache is {layers[index].dtype}")
            rows = dense_rows(layer)
            if rows is not None and not all(bool(torch.isfinite(part.float()).all()) for pair in rows for part in pair):
                raise Failure(f"layer {index}: stored rows are not finite")

    examples = [
        {"options": options, "dtype": dtype} for options in case.option_sets for dtype in ("float32", "bfloat16", "float16")
    ]
    return Evidence(case.for_each(examples, body))
