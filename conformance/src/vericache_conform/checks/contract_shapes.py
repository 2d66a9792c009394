"""Lengths, head layouts and kinds of layer: taken, or refused early and by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vericache_conform.case import PREFERRED_DIMS, Case
from vericache_conform.check import check
from vericache_conform.outcome import Evidence, Failure, Skip
from vericache_conform.stored import attend, stored_layers
from vericache_conform.world import World, layout
from vericache_core.kv import CompressedKV


def whole_maps(compressed: CompressedKV) -> None:
    """Raise ``Failure`` unless every surviving-index map is sound."""
    for index, layer in stored_layers(compressed):
        try:
            layer.surviving.check_integrity()
        except ValueError as error:
            raise Failure(f"the map of layer {index} contradicts itself: {error}") from error


def sound(compressed: CompressedKV, world: World, tokens: int) -> None:
    """Raise ``Failure`` unless every layer keeps something and answers queries with finite numbers."""
    whole_maps(compressed)
    for index, layer in stored_layers(compressed):
        if not tokens:
            continue
        if min(layer.surviving.counts) < 1:
            raise Failure(f"layer {index} keeps nothing of {tokens} tokens in a KV head")
        query = world.queries[index][:, :3].float() * world.layers[index].scaling
        answer = attend(layer, query)
        expected = (world.layers[index].heads, query.shape[1], world.layers[index].value_dim)
        if tuple(answer.shape) != expected or not bool(torch.isfinite(answer).all()):
            raise Failure(f"layer {index} of {tokens} tokens answers {tuple(answer.shape)} with NaN or a wrong shape")


def _try_shapes(case: Case, shapes: list[dict[str, Any]], least: int, act: Callable[[Case, Any, World], None]) -> Evidence:
    """Try layouts; each works or is refused by name, and at least ``least`` work."""
    refused: list[str] = []
    worked = 0

    def body(example: dict[str, Any]) -> None:
        nonlocal worked
        layers = layout(**example["shape"])
        compressor = case.create(example["options"])
        reason = case.refusal(compressor, layers)
        if reason is not None:
            refused.append(reason)
            return
        act(case, compressor, World(layers, case.length, case.seed))
        worked += 1

    examples = [{"options": options, "shape": shape} for options in case.option_sets for shape in shapes]
    tried = case.for_each(examples, body)
    if worked < min(least, tried) and case.only is None:
        raise Failure(f"only {worked} of {tried} layouts are taken; for example: {refused[0] if refused else 'all declined'}")
    return Evidence(tried, {"refused": sorted(set(refused))})


def _whole_job(case: Case, compressor: Any, world: World) -> None:
    tokens = world.tokens - 5
    made = case.compress(compressor, world, tokens)
    if not any(layer is not None for layer in made.layers):
        raise Failure("no layer was compressed and none was refused")
    sound(made, world, tokens)
    if case.subject.spec.capability("extend") != "no":
        sound(case.extend(compressor, made, world, world.tokens, tokens), world, world.tokens)


@check(
    "C-05",
    tier="contract",
    cost=2.0,
    rationale="Users send prompts of one token, and of exactly the window. A precondition of the paper is not one of theirs.",
    origin="kvpress SnapKV asserts q_len > window; mlx-vlm #2061; ValueError on short chats.",
    fix="Clamp windows, kernels and budgets to the length of the prefix; an empty prefix gives an empty result.",
)
def awkward_lengths(case: Case) -> Evidence:
    """Prefixes of 0, 1, 2, a prime number of tokens, and around every boundary of the options, all work."""

    def body(example: dict[str, Any]) -> None:
        compressor = case.create(example["options"])
        world = World(case.layers(example["options"]), max(3, example["tokens"]), case.seed)
        sound(case.compress(compressor, world, example["tokens"]), world, example["tokens"])

    near = {n + d for n in case.landmarks for d in (-1, 0, 1)} | {0, 1, 2, 97, case.length}
    examples = [{"options": options, "tokens": tokens} for options in case.option_sets for tokens in sorted(near)]
    return Evidence(case.for_each(examples, body))


@check(
    "C-22",
    tier="contract",
    cost=1.0,
    rationale="Models share a KV head among 1, 2, 4, 7 or all query heads. Mixing the two counts up gives results of the right "
    "shape and the wrong heads.",
    origin="Head counts taken from the wrong side, norms sized for expanded heads: 0 % on GSM8K without an error.",
    fix="Take kv_heads and group from the layer descriptor; reduce query heads by reshaping to [kv_heads, group, ...].",
)
def grouped_heads(case: Case) -> Evidence:
    """1, 2, 4 and 7 query heads per KV head, one KV head and one layer all work."""
    dim = case.layers()[0].head_dim
    shapes: list[dict[str, Any]] = [
        {"heads": group * kv, "kv_heads": kv, "head_dim": dim} for group, kv in ((1, 2), (2, 2), (4, 1), (7, 1), (7, 2))
    ]
    shapes.append({"layers": 1, "heads": 4, "kv_heads": 2, "head_dim": dim})
    return _try_shapes(case, shapes, len(shapes) * len(case.option_sets), _whole_job)


@check(
    "C-23",
    tier="contract",
    cost=1.5,
    rationale="Head dimensions of real models are 64, 80, 96, 128 and 256. A method that needs a power of two must say so "
    "before the first prompt, not in the middle of it.",
    origin="Kernels with the width built in; group sizes that do not divide 80.",
    fix="Refuse in `check_layers` with an OptionError that names the option, the layer and a value that would fit.",
)
def head_dims(case: Case) -> Evidence:
    """Every head_dim from 16 to 256 works or is refused early and by name."""
    shapes = [{"head_dim": dim} for dim in sorted(PREFERRED_DIMS)]
    return _try_shapes(case, shapes, 2, _whole_job)


@check(
    "C-24",
    tier="contract",
    cost=1.0,
    rationale="Gemma and Mistral mix sliding-window layers in, Phi rotates only part of a head, some models have other value "
    "widths or scalings. Compressing such a layer as if it were ordinary damages it silently.",
    origin="Presses that prune sliding layers (63 -> 31 rows) or crash on partial rotary; scores with 1/sqrt(D) always.",
    fix="Decline layers in `supports` (they stay exact), use layer.scaling, layer.value_dim and layer.rotary_dim.",
)
def kinds_of_layer(case: Case) -> Evidence:
    """Sliding-window layers stay uncompressed unless supported; partial rotary, value_dim and scaling are respected."""
    spec, dim = case.subject.spec, case.layers()[0].head_dim
    shapes: list[dict[str, Any]] = [
        {"windows": [16, None], "head_dim": dim},
        {"value_dim": dim * 2, "head_dim": dim},
        {"scaling": 0.37, "head_dim": dim},
    ]
    if spec.capability("partial_rotary") != "no":
        shapes.append({"rotary_dim": dim // 2, "head_dim": dim})

    def act(case: Case, compressor: Any, world: World) -> None:
        _whole_job(case, compressor, world)
        made = case.compress(compressor, world, world.tokens)
        for layer, stored in zip(world.layers, made.layers, strict=True):
            supported = bool(compressor.supports(layer))
            if layer.kind == "sliding" and supported and spec.capability("sliding_window") != "yes":
                raise Failure(
                    f"layer {layer.index} has a sliding window and is not declined, but the capability is not declared"
                )
            if supported != (stored is not None):
                raise Failure(f"layer {layer.index}: supports() says {supported}, compress returned {type(stored).__name__}")

    return _try_shapes(case, shapes, 2, act)


@check(
    "C-14",
    tier="contract",
    cost=1.5,
    rationale="Padding, dead channels and overflow happen. NaN that survives masking turns a whole answer into noise; a typed "
    "error only costs speed.",
    origin="Constant channels: scale 0, then 0/0; fp16 scales that underflow; NaN counts as the largest score in topk.",
    fix="Guard the range of a group in float32, refuse what is not finite with CompressorFault (`require_finite`).",
)
def awkward_numbers(case: Case) -> Evidence:
    """Zeros, constants, ties and huge rows give finite results; NaN and infinity a typed error or finite results."""
    from vericache_core.errors import VeriCacheError

    promises = case.subject.spec.capability("nonfinite_input")

    def body(example: dict[str, Any]) -> None:
        compressor = case.create(example["options"])
        layers = case.layers(example["options"], dtype=example["dtype"])
        world = World(layers, case.length, case.seed, example["flavour"])
        if example["poison"] is None:
            sound(case.compress(compressor, world, case.length), world, case.length)
            return
        target = world.keys if example["part"] == "keys" else world.values
        target[1][0, case.length // 3, 1] = float(example["poison"])
        try:
            made = compressor.compress(world.view(0, case.length), world.context(compressor.needs, case.length))
        except VeriCacheError:
            return
        except Exception as error:
            raise Failure(f"{example['poison']} in {example['part']} raised {type(error).__name__}, no typed error") from error
        if promises == "yes":
            raise Failure(f"nonfinite_input is declared, but {example['poison']} in the {example['part']} was taken silently")
        whole_maps(made)

    flavours = ("zeros", "constant", "ties", "large", "shifted", "alternating", "one-hot")
    examples: list[dict[str, Any]] = [
        {"options": options, "dtype": dtype, "flavour": flavour, "poison": None, "part": None}
        for options in case.option_sets
        for flavour in flavours
        for dtype in (("float32", "float16") if flavour in ("constant", "large") else ("bfloat16",))
    ]
    examples += [
        {"options": {}, "dtype": "float32", "flavour": "normal", "poison": poison, "part": part}
        for poison in ("nan", "inf", "-inf")
        for part in ("keys", "values")
    ]
    if not case.option_sets:
        raise Skip("no option sets")
    return Evidence(case.for_each(examples, body))
