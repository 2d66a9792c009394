"""The surviving-index map: what it says must be true, and must be the rows that are stored."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from vericache_conform.case import Case
from vericache_conform.check import check
from vericache_conform.outcome import Evidence, Failure, Skip
from vericache_conform.stored import dense_rows, stored_layers
from vericache_conform.world import World
from vericache_core.kv import CompressedKV


def prefix_examples(case: Case, dtypes: tuple[str, ...] = ("float32", "bfloat16")) -> st.SearchStrategy[dict[str, Any]]:
    """A prefix of some length, rows of some kind, options of some set."""
    return st.fixed_dictionaries(
        {
            "options": st.sampled_from(case.option_sets),
            "tokens": st.one_of(st.integers(3, case.length), st.sampled_from([*case.landmarks, case.length])),
            "dtype": st.sampled_from(dtypes),
            "flavour": st.sampled_from(["normal", "ties", "one-hot"]),
            "grow": st.integers(0, 40),
            "seed": st.integers(0, 3),
        }
    )


def made(case: Case, example: dict[str, Any]) -> tuple[World, list[tuple[str, CompressedKV]]]:
    """The compressed prefix of an example, and the same after an extend where the example asks for one."""
    compressor = case.create(example["options"])
    tokens, grow = example["tokens"], example["grow"] if case.subject.spec.capability("extend") != "no" else 0
    layers = case.layers(example["options"], dtype=example["dtype"])
    world = World(layers, tokens + grow, case.seed + example["seed"], example["flavour"])
    first = case.compress(compressor, world, tokens)
    states = [("compress", first)]
    if grow:
        states.append((f"extend by {grow}", case.extend(compressor, first, world, tokens + grow, tokens)))
    return world, states


@check(
    "C-01",
    tier="contract",
    cost=2.0,
    rationale="The runtime copies rows and fetches missing ones by this map; a wrong or unsorted one drafts from the wrong "
    "tokens, and later steps that group along tokens get far worse.",
    origin="kvpress keeps topk order and returns no map; TensorRT-LLM #16836 needs ascending moves.",
    fix="Build the map with HeadMap from ascending positions (stable_topk sorts them), one list per KV head, over the logical "
    "length of the prefix.",
)
def surviving_map(case: Case) -> Evidence:
    """The surviving-index map is int64, strictly ascending, unique, in range and as long as the stored rows."""

    def body(example: dict[str, Any]) -> None:
        world, states = made(case, example)
        for state, compressed in states:
            if len(compressed.layers) != len(world.layers):
                raise Failure(f"after {state}: {len(compressed.layers)} layers for a model of {len(world.layers)}")
            for index, layer in stored_layers(compressed):
                where = f"after {state}, layer {index}"
                surviving, descriptor = layer.surviving, world.layers[index]
                if surviving.kv_heads != descriptor.kv_heads:
                    raise Failure(f"{where}: map of {surviving.kv_heads} KV heads, the model has {descriptor.kv_heads}")
                rows = dense_rows(layer)
                for head in range(surviving.kv_heads):
                    kept = surviving.head(head)
                    if kept.dtype != torch.int64 or kept.dim() != 1:
                        raise Failure(f"{where}, head {head}: positions are {kept.dtype} {tuple(kept.shape)}, not int64 [kept]")
                    if len(kept) > 1 and not bool((kept[1:] > kept[:-1]).all()):
                        raise Failure(f"{where}, head {head}: positions are not strictly ascending")
                    if len(kept) and (int(kept[0]) < 0 or int(kept[-1]) >= surviving.tokens):
                        raise Failure(f"{where}, head {head}: a position lies outside [0, {surviving.tokens})")
                    if len(kept) != surviving.counts[head]:
                        raise Failure(f"{where}, head {head}: {len(kept)} positions, the count says {surviving.counts[head]}")
                    if rows is not None and len(rows[head][0]) != len(kept):
                        raise Failure(f"{where}, head {head}: {len(kept)} positions but {len(rows[head][0])} stored rows")

    return Evidence(case.for_all(prefix_examples(case), body))


@check(
    "C-02",
    tier="contract",
    kinds=["token-drop"],
    cost=2.0,
    rationale="A token dropper promises that what it keeps is exact. The swap then moves only the dropped rows; if a kept row "
    "differs by one bit, the rebuilt full cache is wrong.",
    origin="Presses that re-rotate or merge rows call themselves eviction.",
    fix="Gather with PlainLayer.gather from the rows you were given, in their dtype, without re-rotating, merging or scaling.",
)
def rows_are_the_source_rows(case: Case) -> Evidence:
    """Kept K/V rows equal the source rows at the mapped positions, bit for bit."""
    compared = 0

    def body(example: dict[str, Any]) -> None:
        nonlocal compared
        world, states = made(case, example)
        for state, compressed in states:
            for index, layer in stored_layers(compressed):
                rows = dense_rows(layer)
                if rows is None:
                    raise Skip(f"{type(layer).__name__} is a form of its own; C-18 compares what it answers")
                for head, (keys, values) in enumerate(rows):
                    at = layer.surviving.head(head)
                    for part, stored, source in (("keys", keys, world.keys), ("values", values, world.values)):
                        expected = source[index][head].index_select(0, at)
                        if stored.dtype != expected.dtype or not torch.equal(stored, expected):
                            raise Failure(f"after {state}, layer {index}, head {head}: {part} differ from the source rows")
                        compared += len(at)

    tried = case.for_all(prefix_examples(case), body)
    return Evidence(tried, {"rows_compared": compared})


@check(
    "C-17",
    tier="contract",
    cost=1.0,
    rationale="The next token's position is the logical length. A length that shrinks with eviction rotates every later query "
    "to the wrong place, and the text rots without an error.",
    origin="VeloxQuant-MLX #137, #171, #389; hipfire #391; keys_values #140; TensorRT-LLM #15697.",
    fix="Return prefix.tokens as the length of the compressed KV and of every map, however few rows survive; extend adds "
    "rows.tokens, rollback takes tokens away.",
)
def logical_length(case: Case) -> Evidence:
    """The logical length, and so the position of the next token, ignores evictions."""

    def body(example: dict[str, Any]) -> None:
        world, states = made(case, example)
        for (state, compressed), tokens in zip(states, (example["tokens"], world.tokens), strict=False):
            lengths = {"compressed KV": compressed.tokens}
            lengths |= {f"layer {i}": layer.tokens for i, layer in stored_layers(compressed)}
            lengths |= {f"map of layer {i}": layer.surviving.tokens for i, layer in stored_layers(compressed)}
            wrong = {name: length for name, length in lengths.items() if length != tokens}
            if wrong:
                name, length = next(iter(wrong.items()))
                raise Failure(f"after {state}: {name} stands for {length} tokens, the full cache has {tokens}")

    return Evidence(case.for_all(prefix_examples(case, ("float32",)), body))
