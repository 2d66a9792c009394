"""The contest: every system on every workload, repetitions interleaved in an order drawn from a seed.

Machines get slower and faster while they run; systems that take turns share that, and their ratios keep.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from vericache_core.bench.throughput.measured import Measured, System, Unavailable
from vericache_core.bench.throughput.rows import Record
from vericache_core.bench.throughput.workloads import Workload

Tell = Callable[[str], None]


def contest(
    systems: Sequence[System], workloads: Sequence[Workload], repeats: int, seed: int, tell: Tell
) -> Iterator[tuple[Record, int | None, bool]]:
    """Run everything; yields ``(record, repetition or None, last)`` whenever a record has changed.

    ``repetition`` is the run that is new, ``None`` when the record got its problem instead. ``last`` says that the
    workload is done with it. The first system is run first in every workload, as the others are compared with it.
    A system that fails is left out of the rest of its workload; Ctrl-C ends the contest.
    """
    for workload in workloads:
        yield from _workload(systems, workload, repeats, random.Random(f"{seed}:{workload.name}"), tell)  # noqa: S311


def _workload(
    systems: Sequence[System], workload: Workload, repeats: int, draw: random.Random, tell: Tell
) -> Iterator[tuple[Record, int | None, bool]]:
    records = {
        id(system): Record(system.name, workload.name, system.lossless, place, facts(workload))
        for place, system in enumerate(systems)
    }
    able: list[System] = []
    try:
        for system in systems:
            record = records[id(system)]
            try:
                system.prepare(workload)
                able.append(system)
            except Unavailable as reason:
                record.problem, record.skipped = str(reason), True
            except Exception as error:  # noqa: BLE001  (a system that fails costs its row, not the others')
                record.problem = _describe(error)
            if record.problem is not None:
                tell(f"{workload.name}: {system.name}: {record.problem}")
                yield record, None, True
        for repetition in range(repeats):
            order = able[1:]
            draw.shuffle(order)
            for system in [*able[:1], *order]:
                record = records[id(system)]
                measured = _run(system, workload, record)
                if measured is None:
                    able.remove(system)
                    tell(f"{workload.name}: {system.name}: {record.problem}")
                    yield record, None, True
                else:
                    record.runs[repetition] = measured
                    rate = f"{measured.tokens_per_s:.1f} tokens/s"
                    tell(f"{workload.name}: run {repetition + 1} of {repeats}: {system.name}: {rate}")
                    yield record, repetition, repetition == repeats - 1
    finally:
        for system in systems:
            system.release()


def _run(system: System, workload: Workload, record: Record) -> Measured | None:
    try:
        return system.run(workload)
    except Exception as error:  # noqa: BLE001  (as above)
        record.problem = _describe(error)
        return None


def facts(workload: Workload) -> dict[str, object]:
    """What a row says about its workload."""
    lengths = [len(prompt.token_ids) for prompt in workload.prompts]
    return {
        "requests": len(lengths),
        "context": workload.context,
        "prompt_tokens": lengths,
        "new_tokens": workload.new_tokens,
        "tier": workload.tier,
        "slowdown": workload.slowdown,
        "budget_share": workload.budget_share,
    }


def _describe(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if type(error).__module__.startswith("vericache_core") else f"{type(error).__name__}: {text}"
