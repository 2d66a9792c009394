"""Measured runs beside what the simulator says of them: how far the one is from the other.

The runs are those of ``vericache bench throughput --lines FILE``. What a run knows of its drafts is taken from it: which
tokens of each answer were drafted wrongly, and how fast its link was. Times and bytes are the simulator's own, from a
calibration of the machine.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from vericache_core.bench.throughput.lines import parsed_line
from vericache_core.errors import UsageError
from vericache_core.runtime.costs import CostModel, Link
from vericache_core.runtime.modes import Mode
from vericache_core.runtime.schedulable import Bytes
from vericache_core.runtime.trace import Arrival
from vericache_core.simulate.compare import Order, Setup, simulate
from vericache_core.simulate.hardware import DEVICES
from vericache_core.simulate.request import Compression

RUNS_SCHEMA: Final = "vericache.bench.throughput.runs/1"
UNLIMITED: Final = 1e18
"""Bytes that stand for no budget."""
_OURS: Final = re.compile(r"(vericache|lockstep|auto)(?: (\S+?))?(?: x(\d+|auto))?")


@dataclass(frozen=True)
class MeasuredRow:
    """One system on one workload; ``None`` where the runs do not say.

    Attributes:
        prompts: tokens of each request's prompt.
        new_tokens: of each answer, the first of which is no part of the measured time.
        tier: of the full KV, None for the device.
        budget_share: device bytes for KV as a share of all requests' full KV, None without limit.
        tokens_per_s: median over the repetitions, and so are the share of swap time that was hidden and the peak.
        link: bytes a second of its swaps.
        answers: by request and token, 1.0 where a draft was wrong and 0.0 elsewhere; empty without drafts.
        processor: ``cpu`` or ``cuda``, where it ran.
        drafted: in each round, where that was the same for all but those that the end of the answer cut short; else None.
    """

    system: str
    workload: str
    prompts: tuple[int, ...]
    new_tokens: int
    tier: str | None
    budget_share: float | None
    tokens_per_s: float
    hidden: float | None
    peak: float | None
    link: float | None
    answers: tuple[tuple[float, ...], ...]
    processor: str
    drafted: int | None = None


@dataclass(frozen=True)
class Compared:
    """A row and the same simulated; ``skipped`` says why it was not."""

    measured: MeasuredRow
    tokens_per_s: float | None = None
    hidden: float | None = None
    peak: float | None = None
    skipped: str | None = None

    @property
    def off(self) -> dict[str, float | None]:
        """Simulated over measured, less 1; of the hidden share the difference."""
        found = self.measured
        return {
            "tokens_per_s": None if self.tokens_per_s is None else self.tokens_per_s / found.tokens_per_s - 1,
            "hidden": None if self.hidden is None or found.hidden is None else self.hidden - found.hidden,
            "peak": self.peak / found.peak - 1 if self.peak and found.peak else None,
        }


def read_runs(path: str) -> list[MeasuredRow]:
    """The rows of a file that ``--lines`` wrote; systems and workloads without a run are left out.

    Raises:
        UsageError: it cannot be read or is another file.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--compare {path}: cannot be read", cause=str(error)) from error
    head = parsed_line(lines[0]) if lines else None
    if head is None or head.get("schema") != RUNS_SCHEMA:
        raise UsageError(f"--compare {path}: holds no runs", hint="it takes what vericache bench throughput --lines wrote")
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in map(parsed_line, lines[1:]):  # the last one may have been cut off
        if line is not None and line.get("run") is not None:
            found.setdefault((line["workload"], line["system"]), []).append(line)
    try:
        return [_row(lines, str(head["head"]["device"])) for lines in found.values()]
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"--compare {path}: holds runs of another form", cause=repr(error)) from error


def _row(lines: Sequence[Mapping[str, Any]], processor: str) -> MeasuredRow:
    facts, runs = lines[0]["facts"], [line["run"] for line in lines]
    rounds = next((run["trace"]["windows"] for run in runs if run["trace"] is not None), ())
    swapped, seconds = (sum(run[name] or 0.0 for run in runs) for name in ("swap_bytes", "swap_seconds"))
    return MeasuredRow(
        lines[0]["system"],
        lines[0]["workload"],
        tuple(facts["prompt_tokens"]),
        facts["new_tokens"],
        facts["tier"],
        facts["budget_share"],
        statistics.median(run["decoded"] / run["decode_seconds"] for run in runs),
        _median(run["swap_hidden_fraction"] for run in runs),
        _median(run["peak_device_kv_bytes"] for run in runs),
        swapped / seconds if seconds else None,
        _answers(rounds, len(facts["prompt_tokens"]), facts["new_tokens"]),
        processor,
        _window(rounds, facts["new_tokens"]),
    )


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def _answers(rounds: Sequence[Sequence[Any]], requests: int, new_tokens: int) -> tuple[tuple[float, ...], ...]:
    """By request and token 1.0 where a draft was wrong and 0.0 elsewhere, from ``(at, request, drafted, accepted)``.

    A round commits what was accepted and one token more, and if not all was accepted it is that one that was drafted wrongly.
    """
    if not rounds:
        return ()
    wrong = [[0.0] * new_tokens for _ in range(requests)]
    committed = [0] * requests
    for _, request, drafted, accepted in rounds:
        at = committed[request] + accepted
        if accepted < drafted and at < new_tokens:
            wrong[request][at] = 1.0
        committed[request] = at + 1
    return tuple(map(tuple, wrong))


def _window(rounds: Sequence[Sequence[Any]], new_tokens: int) -> int | None:
    """The window of ``rounds`` as for :func:`_answers`, None if it changed."""
    most = max((drafted for _, _, drafted, _ in rounds), default=0)
    committed: dict[int, int] = {}
    for _, request, drafted, accepted in rounds:
        at = committed.get(request, 1)  # a first token came with the prefill
        if drafted < min(most, new_tokens - at - 1):
            return None
        committed[request] = at + accepted + 1
    return most or None


def compare(row: MeasuredRow, costs: CostModel, token_bytes: int, keep: float, ring: int) -> Compared:
    """Simulate ``row`` as the engine ran it.

    Args:
        row: what was measured.
        costs: of the machine.
        token_bytes: of full KV per token.
        keep: draft KV as a fraction of the full KV where the system's name does not say.
        ring: layers of full KV on the device at a time.
    """
    setup = _setup(row, costs, token_bytes, keep, ring)
    if isinstance(setup, str):
        return Compared(row, skipped=setup)
    found = simulate(setup)
    return Compared(row, found.tokens_per_s, found.swap_hidden_fraction, found.peak_kv_bytes)


def _setup(row: MeasuredRow, costs: CostModel, token_bytes: int, keep: float, ring: int) -> Setup | str:
    """What to simulate, or why nothing."""
    ours = _OURS.fullmatch(row.system)
    if row.system != "plain" and ours is None:
        return "not a system that the simulator knows"
    if row.link is not None and row.tier is not None:
        costs = replace(costs, links={**costs.links, row.tier: Link(0.0, 1 / row.link)})
    tokens = sum(prompt + row.new_tokens for prompt in row.prompts)
    budget = UNLIMITED if row.budget_share is None else row.budget_share * tokens * token_bytes
    wrong = sum(map(sum, row.answers)) / max(1, sum(map(len, row.answers)))
    # The first token of an answer comes with its prefill, which is no part of the time.
    arrivals = [Arrival(0.0, prompt + 1, row.new_tokens - 1) for prompt in row.prompts]
    mode: Mode | str = "plain"
    window: int | None = None
    order: Order = "staggered"
    if ours is not None:
        if not row.answers:
            return "its runs hold no rounds of drafts"
        kind, compressor, chosen = ours.groups()
        mode = "auto" if kind == "auto" else "pinned" if row.tier is None else "offloaded"
        window = None if kind == "auto" or chosen == "auto" else row.drafted if chosen is None else int(chosen)
        named = re.search(r"keep=([0-9.]+)", compressor or "")
        keep = float(named[1]) if named else keep
        # As the engine's own "auto": nothing swapped, and all windows alike.
        order = "lockstep" if kind == "lockstep" or (row.tier is None and window is not None) else "staggered"
    return Setup(
        costs,
        token_bytes,
        Bytes(budget),
        arrivals,
        Compression(keep, wrong, row.tier != "disk", ring if row.tier is not None else 0),
        mode,  # type: ignore[arg-type]
        window,
        order,
        row.tier or "host",
        rows=max(costs.shapes),
        turns=row.answers,
        turn=1,
        alongside=DEVICES["cpu-2"].alongside if row.processor == "cpu" else 1.0,
        running=None if mode == "auto" else len(arrivals),
    )
