"""One run of one system, as every kind of system reports it, and how it is kept in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from vericache_core.bench.throughput.workloads import Workload


@dataclass(frozen=True)
class Trace:
    """What happened when, for the plots; seconds count from the beginning of decoding.

    Attributes:
        phases: ``(from, to, request, phase)`` per step and request that had rows in it; ``background`` is a verify
            that ran beside the steps of others.
        swaps: ``(from, to, request)`` per layer of full KV that came in.
        windows: ``(at, request, drafted, accepted)`` per verify round.
        memory: ``(at, device bytes, host bytes, disk bytes)`` of KV.
    """

    phases: list[tuple[float, float, int, str]] = field(default_factory=list)
    swaps: list[tuple[float, float, int]] = field(default_factory=list)
    windows: list[tuple[float, int, int, int]] = field(default_factory=list)
    memory: list[tuple[float, int, int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Measured:
    """One run; ``None`` where a system does not tell.

    Attributes:
        tokens: generated ids of each request.
        decoded: tokens that ``decode_seconds`` paid for.
        prefill_seconds: what reading all prompts cost, once, and is no part of ``decode_seconds``.
        peak_transient_bytes: most device bytes of slots that swapped KV streamed through, in use or kept for reuse.
        transient_layers_per_request: how many layers of the full KV of each request that was swapping then they are;
            ``None`` where nothing was swapped.
        swap_hidden_fraction: share of the time of swaps in which nobody waited for them.
        steps: forwards of the model in ``decode_seconds``, for however many requests at once.
        device_budget_bytes: the workload's cap on device KV; ``None`` for none.
        within_budget: whether device KV stayed below it.
        notes: what a reader has to know about this run.
    """

    tokens: list[list[int]]
    decoded: int
    decode_seconds: float
    prefill_seconds: float | None = None
    compress_seconds: float | None = None
    peak_device_kv_bytes: int | None = None
    peak_transient_bytes: int | None = None
    transient_layers_per_request: float | None = None
    swap_bytes: int | None = None
    swap_seconds: float | None = None
    swap_hidden_fraction: float | None = None
    drafted: int | None = None
    accepted: int | None = None
    steps: int | None = None
    device_budget_bytes: int | None = None
    within_budget: bool | None = None
    notes: list[str] = field(default_factory=list)
    trace: Trace | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.decoded / self.decode_seconds

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Measured:
        trace = found.get("trace")
        return cls(**{**found, "trace": None if trace is None else Trace(**trace)})


class Unavailable(Exception):
    """A system cannot run a workload; the text says why, in a few words."""


class System(Protocol):
    """Something that decodes. Prompts are prefilled in :meth:`prepare` or outside of the time that :meth:`run` takes.

    Attributes:
        name: for the table.
        lossless: it promises plain's tokens, so that other ones are a failure.
    """

    @property
    def name(self) -> str: ...

    @property
    def lossless(self) -> bool: ...

    def prepare(self, workload: Workload) -> None:
        """Get ready for some runs of ``workload``; raises Unavailable."""

    def run(self, workload: Workload) -> Measured:
        """Decode once."""

    def release(self) -> None:
        """Give back what :meth:`prepare` made."""

    def close(self) -> None:
        """Give everything back; safe to call twice."""
