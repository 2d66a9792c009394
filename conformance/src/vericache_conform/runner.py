"""A whole run: several compressors, a list of checks, in worker processes or in this one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vericache_conform.catalogue import all_checks, find_check
from vericache_conform.check import Check
from vericache_conform.execute import Settings, execute
from vericache_conform.expected import Expectations, Expected, read_expectations
from vericache_conform.facts import run_facts
from vericache_conform.isolation import DEFAULT_MEMORY, Worker
from vericache_conform.outcome import Result
from vericache_conform.report.model import CERTIFYING_TIERS, Report, new_header
from vericache_conform.subject import Subject, expectations_file, resolve, version_of
from vericache_core.errors import ConfigError, VeriCacheError
from vericache_core.plugins.passport import digest_of

NOT_LOADED = "the compressor does not load, see S-01"
Listener = Callable[[Result, int, int], None]
"""Called after each result with it, how many are done, and how many there will be."""


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        refs: compressors, see :mod:`vericache_conform.subject`.
        checks: in order.
        options: fixed options, for every compressor.
        seed, model: see :class:`vericache_conform.execute.Settings`.
        memory, timeout_factor: limits of a worker.
        expected: a conformance.toml instead of the plugins' own.
    """

    refs: Sequence[str]
    checks: Sequence[Check]
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    model: str = "demo"
    memory: int | None = DEFAULT_MEMORY
    timeout_factor: float = 1.0
    expected: Path | None = None


def run_isolated(plan: Plan, listen: Listener | None = None, started: Callable[[Report], None] | None = None) -> Report:
    """Run in worker processes, one per compressor; whatever happens in one, the rest of the run completes."""
    loaded = [_load(ref, plan, keep=number == 0) for number, ref in enumerate(plan.refs)]
    report = _begin([entry.described for entry in loaded], plan)
    if started is not None:
        started(report)
    jobs = [(entry, _checks_for(entry, plan)) for entry in loaded]
    total, done = sum(len(checks) for _, checks in jobs), 0
    for entry, checks in jobs:
        name = entry.described["name"]
        with entry.worker as worker:
            for check in checks:
                if entry.problem:
                    failed = check.id == "S-01"
                    outcome = Result(check.id, name, "fail" if failed else "skip", entry.problem if failed else NOT_LOADED)
                else:
                    outcome = worker.run(check)
                done += 1
                _take(report, outcome, entry.expectations, entry.described.get("version", ""), listen, done, total)
    return report


@dataclass(frozen=True)
class _Loaded:
    """A compressor as its worker found it.

    Attributes:
        worker: where its checks run; it may have to start again.
        described: for the header of the report.
        expectations: see :func:`expectations_of`.
        problem: why it does not load, or empty.
    """

    worker: Worker
    described: Mapping[str, Any]
    expectations: Expectations
    problem: str


def _load(ref: str, plan: Plan, *, keep: bool) -> _Loaded:
    """Let a worker load the compressor: whatever that does (hang, print, exit), it does not do it to this process."""
    expected = None if plan.expected is None else str(plan.expected)
    settings = Settings(plan.seed, plan.model)
    worker = Worker(ref, ref, plan.options, settings, plan.memory, plan.timeout_factor, expected)
    found = worker.describe()
    if not keep:  # for a long list of names one process each would fill the memory
        worker.close()
    if found["problem"]:
        described = {"name": ref, "ref": ref, "loaded": False}
        return _Loaded(worker, described, Expectations(), found["problem"])
    worker.name = found["subject"]["name"]
    return _Loaded(worker, found["subject"], Expectations.from_json(found["expectations"]), "")


def _checks_for(entry: _Loaded, plan: Plan) -> list[Check]:
    """The checks of the plan; for what does not load S-01 too, so that the run fails whatever was asked for."""
    checks = list(plan.checks)
    if entry.problem and all(check.id != "S-01" for check in checks):
        checks.insert(0, find_check("S-01"))
    return checks


def run_inline(subject: Subject, checks: Sequence[Check], settings: Settings, listen: Listener | None = None) -> Report:
    """Run in this process: quick, and the way to use a debugger; a crash or a hang is not contained."""
    expectations = expectations_of(subject)
    settings = Settings(settings.seed, settings.model, {subject.name: expectations.declared, **settings.declared})
    plan = Plan([subject.ref or subject.name], checks, subject.options, settings.seed, settings.model)
    report = _begin([describe(subject)], plan)
    started = time.perf_counter()
    for number, check in enumerate(checks, 1):
        _take(report, execute(check, subject, settings), expectations, version_of(subject), listen, number, len(checks))
    report.finish(exit_status(report), time.perf_counter() - started)
    return report


def exit_status(report: Report, level: str = "passed") -> int:
    """As pytest's: 0 when all is well, 1 when something failed, 5 when nothing ran."""
    if not report.results:
        return 5
    if any(result.bad for result in report.results):
        return 1
    if level == "certified" and any(report.level(name) != "certified" for name in report.subjects):
        return 1
    return 0


def _take(
    report: Report,
    result: Result,
    expectations: Expectations,
    version: str,
    listen: Listener | None,
    done: int,
    total: int,
) -> None:
    applied = expectations.apply(result, version)
    report.results.append(applied)
    if listen is not None:
        listen(applied, done, total)


def expectations_of(subject: Subject) -> Expectations:
    """What is expected and declared for a compressor: its conformance.toml, and its plugin's hook."""
    if len(subject.parts) > 1:
        return Expectations(declared=_bound_of_part(subject))
    path = expectations_file(subject)
    read = Expectations()
    if path is not None:
        try:
            read = read_expectations(path, all_checks())
        except ConfigError:  # S-08 reports it, with its line
            read = Expectations()
    try:
        hooks = subject.registry.expected_failures(subject.name)
    except VeriCacheError:
        hooks = {}
    named = {one: Expected(one, "planned", reason) for one, reason in hooks.items()}
    return Expectations(read.path, {**named, **read.expected}, read.declared)


def _bound_of_part(subject: Subject) -> dict[str, Any]:
    """The error bound that the quantizer of a composition declares: it holds for the survivors it encodes too."""
    try:
        declared = expectations_of(resolve(subject.parts[-1])).declared
    except VeriCacheError:
        return {}
    return {key: value for key, value in declared.items() if key == "max_relative_error"}


def _begin(described: Sequence[Mapping[str, Any]], plan: Plan) -> Report:
    required = [check.id for check in all_checks().values() if check.tier in CERTIFYING_TIERS]
    return Report(new_header(described, plan.checks, run_facts(plan.seed, plan.model), required))


def describe(subject: Subject) -> dict[str, Any]:
    """The entry of a compressor in the header of a report; loads it."""
    spec = subject.spec
    return {
        "name": subject.name,
        "ref": subject.ref,
        "loaded": True,
        "kind": spec.kind,
        "api_version": spec.api_version,
        "distribution": subject.distribution,
        "version": version_of(subject),
        "options": dict(subject.options),
        "option_sets": subject.option_sets(),
        "digest": "+".join(str(digest_of(subject.registry.spec(part).factory.__module__)) for part in subject.parts),
    }
