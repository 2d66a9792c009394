"""Who leaves the queue: byte budgets, priorities, patience, preemption. Pure functions, and a bounded queue.

A request is admitted with the bytes of its greatest length, so that no running request ever has to stop because
another one grew. Preemption serves priorities only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from vericache_core.errors import ConfigError, VeriCacheError
from vericache_core.runtime.schedulable import NOTHING, Bytes, Schedulable
from vericache_core.sizes import exact_size

_NONE: Final[Mapping[int, float]] = {}


class QueueFull(VeriCacheError):
    """As many requests wait as may; this one was not taken in and can be sent again later."""


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """Limits of admission.

    Attributes:
        queue: requests that may wait.
        running: requests that may run at a time.
        aging: seconds of waiting that are worth one priority.
        patience: seconds the first in line lets others that fit overtake it.
    """

    queue: int = 1024
    running: int = 1024
    aging: float = 30.0
    patience: float = 5.0


@dataclass(frozen=True, slots=True)
class Admission:
    """Numbers to start, in order, and numbers to preempt before that."""

    start: tuple[int, ...] = ()
    preempt: tuple[int, ...] = ()


def check_acceptable(request: Schedulable, waiting: int, budget: Bytes, policy: AdmissionPolicy) -> None:
    """Refuse a request that finds the queue full or that no empty machine could hold.

    Raises:
        ConfigError, QueueFull: as said.
    """
    needs = held([request])
    tier = needs.lacking(budget)
    if tier is not None:
        raise ConfigError(
            f"the {tier} budget is too small for this request",
            cause=f"it needs {exact_size(getattr(needs, tier))} of {exact_size(getattr(budget, tier))}",
            hint="raise the budget, keep less, or shorten the request",
        )
    if waiting >= policy.queue:
        raise QueueFull(f"{waiting} requests are waiting already", hint="try again later")


def admit(
    waiting: Sequence[Schedulable],
    running: Sequence[Schedulable],
    budget: Bytes,
    now: float,
    policy: AdmissionPolicy,
    swapping: Mapping[int, float] = _NONE,
) -> Admission:
    """Choose who starts and who makes room.

    The line is ordered by priority, which the time since arrival raises, so that nobody waits for ever. Requests
    behind one that does not fit may overtake it while it has waited less than the policy's patience. A request
    preempts running ones only of lower priority, given and raised, and only if that lets it start. ``swapping`` are device
    bytes of swaps under way, by number.
    """
    line = sorted(waiting, key=lambda request: (-_urgency(request, policy), request.arrival, request.number))
    inside = list(running)
    start: list[int] = []
    preempt: list[int] = []
    for request in line:
        victims = _victims(request, inside, budget, policy, start, swapping)
        if victims is None:
            if now - request.arrival >= policy.patience:
                break
            continue
        inside = [other for other in inside if other not in victims]
        preempt += [victim.number for victim in victims]
        inside.append(request)
        start.append(request.number)
    return Admission(tuple(start), tuple(preempt))


def held(requests: Iterable[Schedulable], swapping: Mapping[int, float] = _NONE) -> Bytes:
    """Bytes that requests hold together, with their swaps under way and room for the largest single one."""
    total, largest, now = NOTHING, 0.0, 0.0
    for request in requests:
        total, largest = total + request.holds, max(largest, request.transient)
        now += swapping.get(request.number, 0.0)
    return total + Bytes(max(largest, now), 0.0, 0.0)


def _urgency(request: Schedulable, policy: AdmissionPolicy) -> float:
    """Priority with the time since arrival, less what is the same for all: it never changes, so nobody takes turns."""
    return request.priority - request.arrival / policy.aging


def _victims(
    request: Schedulable,
    inside: Sequence[Schedulable],
    budget: Bytes,
    policy: AdmissionPolicy,
    started: Sequence[int],
    swapping: Mapping[int, float],
) -> list[Schedulable] | None:
    """Running requests whose end lets ``request`` start: none if it fits as it is, None if nothing helps."""
    stay, victims = list(inside), []
    own = _urgency(request, policy)
    below = [other for other in inside if other.priority < request.priority and _urgency(other, policy) < own]
    below = [other for other in below if other.number not in started]
    below.sort(key=lambda other: (_urgency(other, policy), -other.number))
    while len(stay) >= policy.running or held([*stay, request], swapping).lacking(budget) is not None:
        if not below:
            return None
        victims.append(below.pop(0))
        stay.remove(victims[-1])
    return victims
