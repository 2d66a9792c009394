"""No memory: what was compressed before, beside or in between changes nothing."""

from __future__ import annotations

from typing import Any

from vericache_conform.case import Case, attempt
from vericache_conform.check import check
from vericache_conform.outcome import Evidence, Failure
from vericache_conform.stored import fingerprint
from vericache_conform.world import World
from vericache_core.compressor import Compressor
from vericache_core.context import CompressContext
from vericache_core.kv import CompressedKV, PrefixView


def _worlds(case: Case, options: dict[str, Any], count: int) -> list[World]:
    layers = case.layers(options)
    return [World(layers, case.length + 20 - 13 * n, case.seed + n) for n in range(count)]


class _Broken(RuntimeError):
    """Raised by a reader on purpose."""


@check(
    "C-08",
    tier="contract",
    cost=0.5,
    rationale="Requests are compressed in whatever order they arrive. If one sees another, answers leak between users.",
    origin="Presses that normalise scores over the batch; quantization groups that span requests.",
    fix="Keep nothing on the class or in the module; compute from the one prefix you were given.",
)
def batch_mates(case: Case) -> Evidence:
    """The result does not depend on which other requests are compressed, or in what order."""

    def body(example: dict[str, Any]) -> None:
        options, worlds = example["options"], _worlds(case, example["options"], 3)
        alone = [fingerprint(case.compress(case.create(options), world, world.tokens)) for world in worlds]
        for order in ((2, 1, 0), (1, 0, 2)):
            mates = [case.create(options) for _ in worlds]  # all alive at once, as in a batch
            for n in order:
                if fingerprint(case.compress(mates[n], worlds[n], worlds[n].tokens)) != alone[n]:
                    raise Failure(f"request {n} gives other bytes among others (order {order}) than alone")

    return Evidence(case.for_each([{"options": options} for options in case.option_sets], body))


@check(
    "C-13",
    tier="contract",
    cost=0.5,
    rationale="An instance is used again, and a prompt may be aborted half way. What stays behind falsifies the next one.",
    origin="kvpress #221, #244 and commit 04abb96; hooks that stay attached after an exception.",
    fix="Keep intermediate results in local variables, not on self.",
)
def state_reset(case: Case) -> Evidence:
    """A, B, A on one instance gives the same A; also after an exception inside compress."""

    def body(example: dict[str, Any]) -> None:
        options, (first, second) = example["options"], _worlds(case, example["options"], 2)
        compressor = case.create(options)
        expected = fingerprint(case.compress(case.create(options), first, first.tokens))
        for what in ("at first", "again", "after another prompt", "after an aborted prompt"):
            if what == "after another prompt":
                case.compress(compressor, second, second.tokens)
            if what == "after an aborted prompt":
                _abort(compressor, second)
            if fingerprint(case.compress(compressor, first, first.tokens)) != expected:
                raise Failure(f"the same prompt compressed {what} gives other bytes")

    return Evidence(case.for_each([{"options": options} for options in case.option_sets], body))


def _abort(compressor: Compressor, world: World) -> None:
    """Start a compress whose last layer cannot be read."""
    last = len(world.layers) - 1

    def read(index: int) -> Any:
        if index == last:
            raise _Broken
        return world.keys[index], world.values[index]

    view = PrefixView(world.layers, world.token_ids, read)
    try:
        compressor.compress(view, world.context(compressor.needs, world.tokens))
    except _Broken:
        return
    except Exception as error:
        raise Failure(f"a reader's exception came out as {type(error).__name__}: {error}") from error
    raise Failure("compress swallowed the exception of a layer that could not be read")


@check(
    "C-16",
    tier="contract",
    capability="extend",
    cost=0.5,
    rationale="A server interleaves requests: A is extended while B is compressed. State on the instance then belongs to the "
    "wrong one.",
    origin="Head-wise presses keep masks on the module: an interleaved prefill erases the first one's compression.",
    fix="Everything a later extend or rollback needs must be inside the CompressedKV.",
)
def interleaved_sessions(case: Case) -> Evidence:
    """Two sessions interleaved on one instance give what each gives alone."""
    rolls = case.subject.spec.capability("rollback") != "no"

    def one(compressor: Compressor, world: World, step: int, held: CompressedKV | None) -> CompressedKV:
        if held is None:
            return case.compress(compressor, world, world.tokens - 30)
        if step == 2 and rolls:
            return case.rollback(compressor, held, 4, world)
        return case.extend(compressor, held, world, held.tokens + 9)

    def body(example: dict[str, Any]) -> None:
        options, worlds = example["options"], _worlds(case, example["options"], 2)
        expected: list[list[str]] = []
        for world in worlds:
            compressor, held, marks = case.create(options), None, []
            for step in range(4):
                held = one(compressor, world, step, held)
                marks.append(fingerprint(held))
            expected.append(marks)
        shared = case.create(options)
        state: list[CompressedKV | None] = [None, None]
        for step in range(4):
            for n, world in enumerate(worlds):
                now = state[n] = one(shared, world, step, state[n])
                if fingerprint(now) != expected[n][step]:
                    raise Failure(f"session {n} gives other bytes at step {step + 1} when another session runs in between")

    return Evidence(case.for_each([{"options": options} for options in case.option_sets], body))


@check(
    "C-20",
    tier="contract",
    capability="rollback",
    cost=0.5,
    rationale="A document is compressed once and asked about many times. What the first question leaves behind is in the "
    "second answer.",
    origin="The seen-token counter or packed rows of an earlier answer stay after its rows are removed.",
    fix="extend and rollback return new objects; the compressed prefix they start from stays as it was.",
)
def two_questions(case: Case) -> Evidence:
    """Questions 1, 2, 1 on one compressed context: the third gives what the first gave."""
    if case.subject.spec.capability("extend") == "no":
        raise Failure("rollback is declared without extend, so there is nothing to roll back")

    def body(example: dict[str, Any]) -> None:
        options, worlds = example["options"], _worlds(case, example["options"], 2)
        first, compressor = worlds[0], case.create(example["options"])
        start = first.tokens - 40
        context = case.compress(compressor, first, start)
        mark = fingerprint(context)
        questions = [(first, 21), (_continued(first, start, worlds[1]), 34)]

        def ask(held: CompressedKV, number: int) -> tuple[str, CompressedKV]:
            world, length = questions[number]
            asked = case.extend(compressor, held, world, start + length)
            return fingerprint(asked), case.rollback(compressor, asked, length, world)

        once, held = ask(context, 0)
        if fingerprint(held) != mark:
            raise Failure("the context has other bytes after a question was asked and taken back")
        _, held = ask(held, 1)
        again, _ = ask(held, 0)
        if again != once:
            raise Failure("the first question gives other bytes when it is asked again")
        fresh = attempt(
            "extend", lambda: case.create(options).extend(context, first.view(start, start + 21), CompressContext())
        )
        if fingerprint(fresh) != once:
            raise Failure("a fresh instance extends the same context to other bytes")

    return Evidence(case.for_each([{"options": options} for options in case.option_sets], body))


def _continued(world: World, tokens: int, other: World) -> World:
    """The first ``tokens`` rows of ``world``, then rows of ``other``."""
    made = world.remade(lambda part: part.clone())
    for mine, theirs in zip(made.tensors(), other.tensors(), strict=True):
        mine[:, tokens:] = theirs[:, : mine.shape[1] - tokens]
    return made
