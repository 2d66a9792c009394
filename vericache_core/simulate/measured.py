"""Measured runs beside what the simulator says of them: how far the one is from the other.

The runs are those of ``vericache bench throughput --lines FILE``. What a run knows of its drafts and proposals is taken from
it (:mod:`vericache_core.simulate.replayed`), and how fast its link was. Times and bytes are the simulator's own, from a
calibration of the machine.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from vericache_core.bench.throughput.lines import parsed_line
from vericache_core.errors import UsageError
from vericache_core.runtime.calibration import Calibration
from vericache_core.runtime.costs import Link
from vericache_core.runtime.hazard import Prior
from vericache_core.runtime.modes import Mode
from vericache_core.runtime.schedulable import Bytes
from vericache_core.runtime.trace import Arrival
from vericache_core.simulate.compare import Order, Setup, simulate
from vericache_core.simulate.compression import Compression
from vericache_core.simulate.hardware import DEVICES, copying
from vericache_core.simulate.lookup import Lookup
from vericache_core.simulate.replayed import Round, fixed_window, lookups, rounds, wrong_drafts

RUNS_SCHEMA: Final = "vericache.bench.throughput.runs/1"
ENGINE_PAGE: Final = 128
"""Tokens in a page of the engine's caches."""
UNLIMITED: Final = 1e18
"""Bytes that stand for no budget."""
_OURS: Final = re.compile(r"(plain|ngram|vericache|lockstep|auto)(?: (\S+?))?(?: x(\d+|auto))?")


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
        answers: by request and token the chance that a draft is wrong; empty without drafts. 1.0 and 0.0 where one was
            checked in this row or else in another of the workload with the same compressor.
        lookups: by request, what prompt lookup was to it where it speculated on full KV; empty without.
        processor: ``cpu`` or ``cuda``, where it ran.
        drafter: a system whose compressor it has, where its own name does not say.
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
    lookups: tuple[Lookup, ...] = ()
    drafter: str = ""

    @property
    def kept(self) -> float | None:
        """What of a prefix the drafts keep, if the name of the system or its drafter says so."""
        named = re.search(r"keep=([0-9.]+)", f"{self.system} {self.drafter}")
        return float(named[1]) if named else None


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
        read = [_row(lines, str(head["head"]["device"])) for lines in found.values()]
        return [_completed(row, own, read) for row, own in read]
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise UsageError(f"--compare {path}: holds runs of another form", cause=repr(error)) from error


def _row(lines: Sequence[Mapping[str, Any]], processor: str) -> tuple[MeasuredRow, list[Round]]:
    """A row as far as its own runs know it, and the rounds of one of them."""
    facts, runs = lines[0]["facts"], [line["run"] for line in lines]
    found = next((rounds(run["trace"]) for run in runs if run["trace"] is not None), [])
    requests, new_tokens = len(facts["prompt_tokens"]), facts["new_tokens"] - 1
    swapped, seconds = (sum(run[name] or 0.0 for run in runs) for name in ("swap_bytes", "swap_seconds"))
    row = MeasuredRow(
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
        wrong_drafts([found], requests, new_tokens),
        processor,
        fixed_window(found, new_tokens),
        lookups(found, requests, new_tokens),
    )
    return row, found


def _completed(row: MeasuredRow, own: Sequence[Round], read: Sequence[tuple[MeasuredRow, Sequence[Round]]]) -> MeasuredRow:
    """``row`` with what others of its workload know of drafts, proposals and a link that it did without."""
    ours = _OURS.fullmatch(row.system)
    if ours is None or ours[1] in ("plain", "ngram"):
        return row
    same = [
        (other, found)
        for other, found in read
        if other is not row and (other.workload, other.prompts, other.new_tokens) == (row.workload, row.prompts, row.new_tokens)
    ]
    lending = [(other, found) for other, found in same if other.answers and other.kept is not None]
    # Windows of one length have nearly every token drafted, those of a controller only where they were thought to pay.
    lending = [each for each in lending if _fixed(each[0])] or lending
    compressor = ours[2] or (_compressor(lending[0][0]) if lending else None)
    drafting = [each for each in lending if _compressor(each[0]) == compressor]
    if drafting:
        runs = [own, *(found for _, found in drafting)]
        row = replace(row, answers=wrong_drafts(runs, len(row.prompts), row.new_tokens - 1))
    if ours[1] != "auto":
        return row
    if drafting and row.kept is None:
        row = replace(row, drafter=drafting[0][0].system)
    links = [other.link for other in (row, *(other for other, _ in same)) if other.link is not None]
    # An engine that chooses may have had proposals that it did not ask about; ``ngram`` always asks.
    asking = sorted((row, *(other for other, _ in same)), key=lambda other: other.system != "ngram")
    known = (other.lookups for other in asking if other.lookups)
    return replace(row, link=links[0] if links else None, lookups=next(known, ()))


def _compressor(row: MeasuredRow) -> str | None:
    ours = _OURS.fullmatch(row.system)
    return None if ours is None else ours[2]


def _fixed(row: MeasuredRow) -> bool:
    """Whether its windows were of one length: a few rounds of a controller may be by chance."""
    ours = _OURS.fullmatch(row.system)
    return ours is not None and ours[1] != "auto" and ours[3] != "auto" and row.drafted is not None


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def compare(row: MeasuredRow, calibration: Calibration, token_bytes: int, keep: float, ring: int) -> Compared:
    """Simulate ``row`` as the engine ran it.

    Args:
        row: what was measured.
        calibration: of the machine.
        token_bytes: of full KV per token.
        keep: draft KV as a fraction of the full KV where the system's name does not say.
        ring: layers of full KV on the device at a time.

    Raises:
        ConfigError: the row swaps from a tier that the calibration has no costs of.
    """
    setup = _setup(row, calibration, token_bytes, keep, ring)
    if isinstance(setup, str):
        return Compared(row, skipped=setup)
    found = simulate(setup)
    return Compared(row, found.tokens_per_s, found.swap_hidden_fraction, found.peak_kv_bytes)


def _setup(row: MeasuredRow, calibration: Calibration, token_bytes: int, keep: float, ring: int) -> Setup | str:
    """What to simulate, or why nothing."""
    ours = _OURS.fullmatch(row.system)
    if ours is None:
        return "not a system that the simulator knows"
    kind, _, chosen = ours.groups()
    if kind in ("vericache", "lockstep") and not row.answers:
        return "its runs hold no rounds of drafts"
    if kind == "ngram" and not row.lookups:
        return "its runs hold no rounds of proposals"
    costs, cpu, copies = calibration.costs, DEVICES["cpu-2"], 0.0
    if row.link is not None and row.tier is not None:
        copies = copying(cpu, costs, row.tier, calibration) if row.processor == "cpu" else 0.0
        costs = replace(costs, links={**costs.links, row.tier: Link(0.0, 1 / row.link)})
    tokens = sum(prompt + row.new_tokens for prompt in row.prompts)
    budget = UNLIMITED if row.budget_share is None else row.budget_share * tokens * token_bytes
    # The first token of an answer comes with its prefill, which is no part of the time.
    arrivals = [Arrival(0.0, prompt + 1, row.new_tokens - 1) for prompt in row.prompts]
    mode: Mode | Literal["auto"] = "auto" if kind == "auto" else "pinned" if row.tier is None else "offloaded"
    window: int | None = None if kind == "auto" or chosen == "auto" else row.drafted if chosen is None else int(chosen)
    if kind in ("plain", "ngram"):
        mode, window = "plain", 0
    # As the engine's own "auto": nothing swapped, and all windows alike.
    order: Order = "lockstep" if kind == "lockstep" or (row.tier is None and window is not None) else "staggered"
    return Setup(
        costs,
        token_bytes,
        Bytes(budget),
        arrivals,
        Compression(row.kept or keep, Prior().hazard, row.tier != "disk", ring if row.tier is not None else 0),
        mode,
        window,
        order,
        row.tier or "host",
        prior=Prior(),  # the engine's, before it has seen a draft
        rows=max(costs.shapes),
        turns=row.answers,
        turn=1,
        page=ENGINE_PAGE,
        copies=copies,
        between=cpu.between if row.processor == "cpu" else 0.0,
        lookups=row.lookups if kind in ("auto", "ngram") else (),
        running=None if mode == "auto" else len(arrivals),
    )
