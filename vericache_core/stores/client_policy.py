"""How patient a store client is, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass

from vericache_core.errors import ConfigError


@dataclass(frozen=True)
class ClientPolicy:
    """How patient a client is.

    Attributes:
        timeout: seconds of a call that names no deadline.
        workers: calls under way at a time.
        max_threads: threads in all, those that hang included; more than ``workers``, or one hang stops them all.
        queue: calls that wait for a worker; more are refused.
        attempts: how often a call is tried.
        backoff, backoff_cap: the pause before try n is drawn from 0 to ``min(backoff_cap, backoff * 2**(n - 2))``
            seconds.
        failures, rest: failures in a row after which the store is left alone, and for how many seconds.
        seed: of the pauses; None for other pauses in every process.
    """

    timeout: float = 5.0
    workers: int = 4
    max_threads: int = 8
    queue: int = 64
    attempts: int = 4
    backoff: float = 0.05
    backoff_cap: float = 1.0
    failures: int = 3
    rest: float = 5.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if min(self.workers, self.queue, self.attempts, self.failures) < 1 or self.max_threads < self.workers:
            raise ConfigError("a store client needs a worker, a place in the queue, an attempt, and threads for its workers")
        if not (self.timeout > 0 and self.backoff >= 0 and self.backoff_cap >= 0 and self.rest >= 0):
            raise ConfigError("times of a store client must not be negative, and its timeout must be positive")


@dataclass(frozen=True)
class ClientCounts:
    """What became of calls so far. Every call ends in exactly one of the first four.

    Attributes:
        answered: the store did what was asked, a miss included.
        failed: an error of the store, after all attempts; or the store was full.
        timed_out: ended at the deadline.
        refused: never begun: open breaker, full queue, hung threads, closed.
        hits, misses: of the gets among ``answered``.
        retries: attempts beyond the first.
        late: answers that came after the deadline and were dropped.
        bytes_read, bytes_written: of blobs that were got and put.
        breaker_opened: how often the store was left alone.
        queued, running, hung, threads: at this moment: waiting calls, calls under way, threads left behind, threads.
    """

    answered: int = 0
    failed: int = 0
    timed_out: int = 0
    refused: int = 0
    hits: int = 0
    misses: int = 0
    retries: int = 0
    late: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    breaker_opened: int = 0
    queued: int = 0
    running: int = 0
    hung: int = 0
    threads: int = 0
