"""What a compressor is given is not its own: neither tensors nor global state may change."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vericache_conform.case import Case
from vericache_conform.check import check
from vericache_conform.outcome import Evidence, Failure
from vericache_conform.stored import fingerprint, reachable_tensors, tensor_bytes
from vericache_conform.world import World
from vericache_core.kv import CompressedKV


def whole_job(case: Case, options: dict[str, Any], world: World) -> list[tuple[str, CompressedKV]]:
    """compress, extend and rollback as far as declared, in order."""
    compressor, spec = case.create(options), case.subject.spec
    tokens = world.tokens - 9
    states = [("compress", case.compress(compressor, world, tokens))]
    if spec.capability("extend") != "no":
        states.append(("extend", case.extend(compressor, states[-1][1], world, world.tokens)))
        if spec.capability("rollback") != "no":
            states.append(("rollback", case.rollback(compressor, states[-1][1], 6, world)))
    return states


@check(
    "C-06",
    tier="contract",
    cost=1.0,
    rationale="Identity rests on the full cache being exact. One in-place write of a compressor changes what the verifier "
    "sees, and a view into the full cache keeps all of it alive, so no memory is saved.",
    origin="ThinK writes zeros into the cache; kvpress overwrites masked keys in place at the first decode step.",
    fix="Clone before in-place arithmetic; gather or copy what you keep, never store a slice of what you were given.",
)
def inputs_untouched(case: Case) -> Evidence:
    """Keys, values, queries and earlier results are not changed, and nothing stored aliases them."""

    def body(example: dict[str, Any]) -> None:
        world = World(case.layers(example["options"]), case.length, case.seed)
        given = world.tensors()
        before = [(tensor._version, tensor_bytes(tensor)) for tensor in given]  # noqa: SLF001  # the one way to see a write
        names = [f"{part} of layer {i}" for part in ("keys", "values", "queries") for i in range(len(world.layers))]
        compressor, spec = case.create(example["options"]), case.subject.spec
        held = case.compress(compressor, world, world.tokens - 9)
        states = [("compress", held)]
        if spec.capability("extend") != "no":
            mark = fingerprint(held)
            grown = case.extend(compressor, held, world, world.tokens)
            states.append(("extend", grown))
            if fingerprint(held) != mark:
                raise Failure("extend changed the compressed KV that it was given")
            if spec.capability("rollback") != "no":
                mark = fingerprint(grown)
                states.append(("rollback", case.rollback(compressor, grown, 6, world)))
                if fingerprint(grown) != mark:
                    raise Failure("rollback changed the compressed KV that it was given")
        for name, tensor, (version, content) in zip(names, given, before, strict=True):
            if tensor._version != version or tensor_bytes(tensor) != content:  # noqa: SLF001
                raise Failure(f"the {name} were changed in place")
        owned = {tensor.untyped_storage().data_ptr(): name for name, tensor in zip(names, given, strict=True)}
        for state, compressed in states:
            shared = set(reachable_tensors(compressed.layers)) & set(owned)
            if shared:
                raise Failure(f"after {state}: what is stored shares memory with the {owned[shared.pop()]} of the full cache")

    return Evidence(case.for_each([{"options": options} for options in case.option_sets], body))


@check(
    "C-21",
    tier="contract",
    cost=0.5,
    rationale="The runtime hands out slices of pages and transposes. A method that reads memory and not elements compresses "
    "something else.",
    origin="Kernels that assume contiguous rows; view() instead of reshape().",
    fix="Use reshape, or contiguous() before view and before kernels.",
)
def strided_inputs(case: Case) -> Evidence:
    """Non-contiguous keys, values and queries give the same bytes as contiguous ones."""

    def transposed(part: Tensor) -> Tensor:
        return part.transpose(1, 2).contiguous().transpose(1, 2)

    def inside(part: Tensor) -> Tensor:
        return torch.cat([torch.full_like(part, 7.0), part], 2)[..., part.shape[2] :]

    def body(example: dict[str, Any]) -> None:
        world = World(case.layers(example["options"]), case.length, case.seed)
        expected = [fingerprint(state) for _, state in whole_job(case, example["options"], world)]
        change = {"transposed": transposed, "slice": inside}[example["memory"]]
        for (name, state), mark in zip(whole_job(case, example["options"], world.remade(change)), expected, strict=True):
            if fingerprint(state) != mark:
                raise Failure(f"{name} of {example['memory']} rows gives other bytes than of contiguous ones")

    examples = [{"options": options, "memory": memory} for options in case.option_sets for memory in ("transposed", "slice")]
    return Evidence(case.for_each(examples, body))


@check(
    "C-25",
    tier="contract",
    cost=0.5,
    rationale="A drawn number from a global generator makes two runs of one prompt differ, and a moved generator changes the "
    "user's own sampling.",
    origin="Compactor and leverage presses draw from the global generator.",
    fix="Draw from torch.Generator().manual_seed(...) with a seed out of the options, the context and the layer number.",
)
def global_generators(case: Case) -> Evidence:
    """The global random generators of torch, numpy and Python are neither read nor moved."""

    def states() -> tuple[bytes, bytes, str]:
        return tensor_bytes(torch.get_rng_state()), repr(np.random.get_state()).encode(), repr(random.getstate())  # noqa: NPY002

    def body(example: dict[str, Any]) -> None:
        marks = []
        kept = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
        try:
            for number in (11, 22):
                torch.manual_seed(number)
                np.random.seed(number)  # noqa: NPY002  # the global generator is what this is about
                random.seed(number)
                before = states()
                world = World(case.layers(example["options"]), case.length, case.seed)
                marks.append([fingerprint(state) for _, state in whole_job(case, example["options"], world)])
                if states() != before:
                    raise Failure("a global random generator was moved")
        finally:
            torch.set_rng_state(kept[0])
            np.random.set_state(kept[1])  # noqa: NPY002
            random.setstate(kept[2])
        if marks[0] != marks[1]:
            raise Failure("the result depends on the state of a global random generator")

    return Evidence(case.for_each([{"options": options} for options in case.option_sets], body))
