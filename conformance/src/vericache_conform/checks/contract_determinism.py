"""Same inputs, same bytes: in any process, with any thread count, and from the payload alone."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from vericache_conform.case import Case
from vericache_conform.check import check
from vericache_conform.outcome import Evidence, Failure
from vericache_conform.processes import in_fresh_process
from vericache_conform.stored import attend, fingerprint, stored_layers, tensor_bytes
from vericache_conform.subject import resolve
from vericache_conform.variants import option_variants
from vericache_conform.world import World
from vericache_core.kv import CompressedKV
from vericache_core.plugins.registry import set_default_registry

COMPANY = (11, 700)
"""Tokens of the prompts that are compressed between two of :data:`ALONE`: a shorter and a longer one."""
ALONE = 37
"""Tokens of the prompt that a fresh process compresses before it has seen any other."""


def _examples(case: Case) -> list[dict[str, Any]]:
    grow = 0 if case.subject.spec.capability("extend") == "no" else 33
    variants, _ = option_variants(case.subject)
    return [
        {"options": options, "tokens": case.length, "grow": grow, "flavour": flavour, "seed": case.seed}
        for options, flavour in [
            *[(options, flavour) for options in case.option_sets for flavour in ("normal", "ties")],
            *[(options, "normal") for options in variants],
        ]
    ]


def job(case: Case, example: Mapping[str, Any]) -> tuple[World, CompressedKV]:
    """Rows, and what compressing and extending them makes, of one example.

    Raises:
        Failure: the compressor raised; it carries this example.
    """
    tokens, grow = int(example["tokens"]), int(example["grow"])
    try:
        compressor = case.create(example["options"])
        world = World(case.layers(example["options"]), tokens + grow, int(example["seed"]), str(example["flavour"]))
        made = case.compress(compressor, world, tokens)
        return world, case.extend(compressor, made, world, tokens + grow) if grow else made
    except Failure as failure:  # all examples are made before the first is judged: it must not be taken for another
        failure.example = example
        raise


def _answers(world: World, compressed: CompressedKV) -> str:
    """What fixed queries read from every layer, bit for bit; by one thread, since torch may split a product among several."""
    parts = []
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for index, layer in stored_layers(compressed):
            query = world.queries[index][:, -3:].float() * world.layers[index].scaling
            parts.append(tensor_bytes(attend(layer, query)))
    finally:
        torch.set_num_threads(before)
    return base64.b64encode(b"".join(parts)).decode()


def kept_between(case: Case, options: Mapping[str, Any]) -> list[int]:
    """Tokens of the prompts after which a prompt gives other bytes than before them; each by an instance of its own.

    Only a process that has compressed nothing yet shows it: a mean, a largest or a first value that is kept on a class has
    settled in one that has run other checks.
    """

    def made(tokens: int, seed: int) -> str:
        world = World(case.layers(options), tokens, case.seed + seed)
        return fingerprint(case.compress(case.create(options), world, tokens))

    first = made(ALONE, 0)
    changed = []
    for number, tokens in enumerate(COMPANY, 1):
        made(tokens, number)
        if made(ALONE, 0) != first:
            changed.append(tokens)
    return changed


def fingerprints_task(order: Mapping[str, Any]) -> dict[str, Any]:
    """In a fresh process: whether one prompt changes the next, each example anew, and each payload rebuilt."""
    torch.set_num_threads(order["threads"])
    case = Case(resolve(order["ref"], order["options"]), seed=order["seed"])
    set_default_registry(case.subject.registry)  # from_payload looks compressors up there
    changed, found = kept_between(case, order["examples"][0]["options"]), []
    for example, payload in zip(order["examples"], order["payloads"], strict=True):
        world, made = job(case, example)
        entry = {"fresh": fingerprint(made)}
        try:
            restored = CompressedKV.from_payload(base64.b64decode(payload))
            entry |= {"restored": fingerprint(restored), "answers": _answers(world, restored)}
        except Exception as error:  # noqa: BLE001  # worded by the parent
            entry["error"] = f"{type(error).__name__}: {error}"
        found.append(entry)
    return {"changed": changed, "made": found}


def _elsewhere(case: Case, examples: Sequence[Mapping[str, Any]], hash_seed: int, threads: int) -> dict[str, Any]:
    """The answers of a fresh process; shared by the checks of one run."""
    key = f"elsewhere/{case.seed}/{hash_seed}/{threads}/{len(examples)}/{examples[0]!r}"
    if key not in case.subject.memo:
        payloads = [base64.b64encode(job(case, example)[1].to_payload()).decode() for example in examples]
        order = {"examples": list(examples), "payloads": payloads, "seed": case.seed}
        case.subject.memo[key] = in_fresh_process(case, "fingerprints", order, hash_seed=hash_seed, threads=threads)
    found: dict[str, Any] = case.subject.memo[key]
    return found


@check(
    "C-07",
    tier="contract",
    cost=9.0,
    timeout=300.0,
    rationale="A draft cache that differs from run to run cannot be shared, restored or debugged.",
    origin="Sets and dicts iterated in hash order; reductions split by thread count; a largest score kept on the class.",
    fix="Iterate in a defined order, use stable_topk, keep reductions of scores in float32 and independent of threads, and "
    "nothing from one prompt for the next.",
)
def same_bytes_everywhere(case: Case) -> Evidence:
    """The same input gives the same bytes in two instances and in two processes with other hash seeds and threads."""
    examples: list[Mapping[str, Any]] = [case.only] if case.only is not None else [*_examples(case)]
    marks = [fingerprint(job(case, example)[1]) for example in examples]

    def body(example: Mapping[str, Any]) -> None:
        number = examples.index(example)
        if fingerprint(job(case, example)[1]) != marks[number]:
            raise Failure("two instances give different bytes for the same input")
        for hash_seed, threads in ((1, 1), (2, 2)):
            there = _elsewhere(case, examples, hash_seed, threads)
            if there["changed"]:
                raise Failure(
                    f"in a fresh process a prompt gives other bytes after one of {there['changed'][0]} tokens was compressed: "
                    "something is kept from one prompt for the next, on the class, in the module or in a cache"
                )
            if there["made"][number]["fresh"] != marks[number]:
                raise Failure(f"a process with hash seed {hash_seed} and {threads} thread(s) gives other bytes than this one")

    return Evidence(case.for_each(examples, body))


@check(
    "C-09",
    tier="contract",
    cost=1.0,
    timeout=300.0,
    rationale="Stored KV outlives the process. If a payload lacks one option, another machine decodes it to other numbers, and "
    "nothing says so.",
    origin="VeloxQuant #78 (group size hard-coded on the reading side).",
    fix="Let options_json return every option, put algorithm versions into extra(), and decode from the stored options only.",
)
def payload_is_self_describing(case: Case) -> Evidence:
    """A fresh process rebuilds the compressed KV from the payload alone, for every non-default option."""
    examples: list[Mapping[str, Any]] = [case.only] if case.only is not None else [*_examples(case)]
    _, stuck = option_variants(case.subject)

    def body(example: Mapping[str, Any]) -> None:
        number = examples.index(example)
        world, made = job(case, example)
        there = _elsewhere(case, examples, 1, 1)["made"][number]
        if "error" in there:
            raise Failure(f"the payload cannot be read back: {there['error']}")
        if there["restored"] != fingerprint(made):
            raise Failure("the rebuilt compressed KV has other bytes, options or maps than the one that was written")
        if there["answers"] != _answers(world, made):
            raise Failure("the rebuilt compressed KV answers queries with other bits")

    return Evidence(case.for_each(examples, body), {"options_without_another_value": stuck})


@check(
    "C-26",
    tier="contract",
    cost=0.5,
    rationale="Servers and laptops have other thread counts; drafts, and with them acceptance, must not depend on it.",
    origin="Parallel reductions whose order depends on the number of threads.",
    fix="Avoid sums whose split depends on threads for anything that is compared or stored.",
)
def threads(case: Case) -> Evidence:
    """One and two threads in the same process give the same bytes."""
    before = torch.get_num_threads()

    def body(example: Mapping[str, Any]) -> None:
        marks = []
        for count in (1, 2):
            torch.set_num_threads(count)
            marks.append(fingerprint(job(case, example)[1]))
        if marks[0] != marks[1]:
            raise Failure("one thread and two threads give different bytes")

    try:
        tried = case.for_each(_examples(case)[: 2 * len(case.option_sets)], body)
    finally:
        torch.set_num_threads(before)
    return Evidence(tried)
