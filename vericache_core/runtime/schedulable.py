"""What a scheduler sees of a request, and what it answers with. Engine and simulator bring their own requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Phase = Literal["prefill", "decode", "draft", "verify"]


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes by tier: what a request holds at its greatest length, or what there is of a tier."""

    device: float = float("inf")
    host: float = float("inf")
    disk: float = float("inf")

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.device + other.device, self.host + other.host, self.disk + other.disk)

    def __sub__(self, other: Bytes) -> Bytes:
        return Bytes(self.device - other.device, self.host - other.host, self.disk - other.disk)

    def lacking(self, room: Bytes) -> str | None:
        """Name the first tier of ``room`` that cannot hold these bytes."""
        for tier in ("device", "host", "disk"):
            if getattr(self, tier) > getattr(room, tier):
                return tier
        return None


NOTHING = Bytes(0.0, 0.0, 0.0)


class Schedulable(Protocol):
    """A request as schedulers read it, live, at every plan. Bytes and seconds are estimates of the one who brings it."""

    @property
    def number(self) -> int:
        """Unique."""

    @property
    def arrival(self) -> float:
        """Seconds on the clock that ``plan`` is called with."""

    @property
    def priority(self) -> int:
        """Higher goes first."""

    @property
    def holds(self) -> Bytes:
        """Bytes it holds at its greatest length, without what is on the device for a verify only."""

    @property
    def transient(self) -> float:
        """Device bytes it takes from the start of a swap to the end of the verify; 0 when pinned or plain."""

    @property
    def link_seconds(self) -> float:
        """Link time of one swap; 0 when pinned or plain."""

    @property
    def swapped_in(self) -> bool:
        """Whether all of its full KV is on the device; always when pinned or plain."""

    @property
    def prefill(self) -> int:
        """Rows of its prompt (or of what is recomputed after a preemption) that are still to run."""

    @property
    def away(self) -> bool:
        """Whether its verify is under way beside the steps: until that is done it has no rows."""

    @property
    def drafting(self) -> bool:
        """Whether it has a draft KV; a plain request decodes one row a step."""

    @property
    def drafts(self) -> int:
        """Tokens drafted since the last verify."""

    @property
    def window(self) -> int:
        """Tokens it wants to draft before the next verify."""

    @property
    def most(self) -> int:
        """Tokens it may draft before the next verify, whatever the window: the rest of its answer."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one request in a step; a verify carries all drafts and the newest committed token."""

    number: int
    phase: Phase
    rows: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What happens next.

    Attributes:
        start: requests that leave the queue; theirs may be the first rows of this very step.
        preempt: running requests that give back everything they hold and go back to the queue, before any start.
        parts: rows of the step; none when there is nothing to run.
        streams: requests whose full KV is to come to the device now, the most urgent first. A request stays in
            this list until its verify is done; what streams already goes on.
    """

    start: tuple[int, ...] = ()
    preempt: tuple[int, ...] = ()
    parts: tuple[Part, ...] = ()
    streams: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Rows of the step, before padding."""
        return sum(part.rows for part in self.parts)


class Scheduler(Protocol):
    """Decides, step by step. Staggered and lock-step schedulers share this form."""

    def submit(self, request: Schedulable) -> None:
        """Take a request into the queue.

        Raises:
            QueueFull: there are too many already.
            ConfigError: it can never fit.
        """

    def remove(self, number: int) -> None:
        """Forget a request that finished or was cancelled, queued or running; unknown numbers are no error."""

    def plan(self, now: float) -> StepPlan:
        """Return the next step at clock ``now``, in seconds."""

    def done(self, plan: StepPlan, seconds: float) -> None:
        """Say that a plan was carried out, with those of its parts that were, and how long its step took."""

    beside: bool
    """Whether a verify whose swap is long may run beside the steps of others."""

    aside: float
    """Device bytes of the budget that others than its requests hold; those that wait for them wait."""

    @property
    def budget(self) -> Bytes:
        """Bytes that there are, by tier."""

    @property
    def running(self) -> Sequence[Schedulable]:
        """Requests that have left the queue."""

    @property
    def waiting(self) -> Sequence[Schedulable]:
        """Requests in the queue."""
