"""Requests and a machine of the simplest kind, to drive schedulers with."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from vericache_core.runtime.schedulable import Bytes, Scheduler, StepPlan


@dataclass
class Toy:
    """A request that accepts half of its drafts; ``to_do`` tokens are left."""

    number: int
    arrival: float = 0.0
    priority: int = 0
    holds: Bytes = field(default_factory=lambda: Bytes(1.0, 0.0, 0.0))
    transient: float = 0.0
    link_seconds: float = 0.0
    prefill: int = 0
    drafting: bool = True
    drafts: int = 0
    window: int = 4
    to_do: int = 20
    swapped: float = 0.0
    prompt: int = 0
    away: bool = False

    @property
    def swapped_in(self) -> bool:
        return self.swapped >= self.link_seconds - 1e-9

    @property
    def most(self) -> int:
        return max(0, self.to_do - 1)


@dataclass
class Machine:
    """Carries plans out: a step takes ``step`` seconds, a swap its link time at ``speed``; finished requests leave."""

    scheduler: Scheduler
    requests: dict[int, Toy]
    step: float = 1.0
    speed: float = 1.0
    now: float = 0.0
    exposed: float = 0.0
    log: list[StepPlan] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)

    def run(self, steps: int, budget: Bytes | None = None, rows: int = 128) -> None:
        for _ in range(steps):
            plan = self.scheduler.plan(self.now)
            self.log.append(plan)
            self._check(plan, budget, rows)
            for number in plan.preempt:
                toy = self.requests[number]
                toy.prefill, toy.drafts, toy.swapped = toy.prompt, 0, 0.0
            seconds = self._link(plan)
            self._rows(plan)
            self.scheduler.done(plan, seconds)
            self.now += seconds
            for number in [number for number, toy in self.requests.items() if toy.to_do <= 0]:
                self.scheduler.remove(number)
                self.finished.append(number)
                del self.requests[number]

    def _link(self, plan: StepPlan) -> float:
        verifies = {part.number for part in plan.parts if part.phase == "verify"}
        must = sum(self.requests[number].link_seconds - self.requests[number].swapped for number in verifies)
        seconds = max(self.step, must / self.speed)
        self.exposed += seconds - self.step
        left = seconds * self.speed
        for number in sorted(plan.streams, key=lambda number: number not in verifies):
            toy = self.requests[number]
            moved = min(left, toy.link_seconds - toy.swapped)
            toy.swapped, left = toy.swapped + moved, left - moved
        return seconds

    def _rows(self, plan: StepPlan) -> None:
        for part in plan.parts:
            toy = self.requests[part.number]
            if part.phase == "prefill":
                toy.prefill -= part.rows
            elif part.phase == "draft":
                toy.drafts += 1
            else:
                toy.to_do -= toy.drafts // 2 + 1
                toy.drafts, toy.swapped = 0, 0.0

    def _check(self, plan: StepPlan, budget: Bytes | None, rows: int) -> None:
        running = {toy.number: toy for toy in self.scheduler.running}
        numbers = [part.number for part in plan.parts]
        assert len(numbers) == len(set(numbers))
        assert set(numbers) <= set(running)
        assert plan.rows <= rows
        for part in plan.parts:
            toy = self.requests[part.number]
            assert (part.phase == "prefill") == (toy.prefill > 0)
            if part.phase == "verify":
                assert part.rows == toy.drafts + 1
                assert toy.swapped_in or part.number in plan.streams
            elif part.phase != "prefill":
                assert part.rows == 1
        if budget is not None:
            swaps = sum(self.requests[number].transient for number in plan.streams)
            held = Bytes(swaps, 0.0, 0.0)
            for request in running.values():
                held = held + request.holds
            assert held.lacking(budget) is None


def toys(count: int, seed: int, **fixed: object) -> dict[int, Toy]:
    """Random requests, some plain, some pinned, some offloaded; ``fixed`` overrides."""
    numbers, made = random.Random(seed), {}
    for number in range(count):
        kind = numbers.choice(["plain", "pinned", "offloaded"])
        toy = Toy(
            number,
            arrival=numbers.uniform(0, 30),
            priority=numbers.choice([0, 0, 0, 1, 2]),
            holds=Bytes(numbers.uniform(0.5, 2), numbers.uniform(0, 2), 0.0),
            transient=numbers.uniform(1, 3) if kind == "offloaded" else 0.0,
            link_seconds=numbers.uniform(0.2, 5) if kind == "offloaded" else 0.0,
            drafting=kind != "plain",
            window=numbers.choice([0, 1, 4, 9]) if kind != "plain" else 0,
            to_do=numbers.randint(1, 40),
            prompt=numbers.choice([0, 7, 300]),
        )
        for name, value in fixed.items():
            setattr(toy, name, value)
        toy.prefill = toy.prompt
        made[number] = toy
    return made
