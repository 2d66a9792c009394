"""A whole run: several compressors, a list of checks, in worker processes or in this one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vericache_conform.catalogue import all_checks
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
    subjects = [_found(ref, plan) for ref in plan.refs]
    report = _begin(plan, subjects)
    if started is not None:
        started(report)
    done = 0
    for ref, (subject, problem) in zip(plan.refs, subjects, strict=True):
        name = ref if subject is None else subject.name
        expectations = expectations_of(subject)
        settings = Settings(plan.seed, plan.model, {name: expectations.declared})
        expected = None if plan.expected is None else str(plan.expected)
        with Worker(ref, name, plan.options, settings, plan.memory, plan.timeout_factor, expected) as worker:
            for check in plan.checks:
                if subject is None:
                    outcome = Result(check.id, name, "fail" if check.id == "S-01" else "skip", problem)
                else:
                    outcome = worker.run(check)
                done += 1
                _take(report, outcome, expectations, subject, listen, done, len(plan.refs) * len(plan.checks))
    return report


def run_inline(subject: Subject, checks: Sequence[Check], settings: Settings, listen: Listener | None = None) -> Report:
    """Run in this process: quick, and the way to use a debugger; a crash or a hang is not contained."""
    expectations = expectations_of(subject)
    settings = Settings(settings.seed, settings.model, {subject.name: expectations.declared, **settings.declared})
    plan = Plan([subject.ref or subject.name], checks, subject.options, settings.seed, settings.model)
    report = _begin(plan, [(subject, "")])
    started = time.perf_counter()
    for number, check in enumerate(checks, 1):
        _take(report, execute(check, subject, settings), expectations, subject, listen, number, len(checks))
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
    subject: Subject | None,
    listen: Listener | None,
    done: int,
    total: int,
) -> None:
    applied = expectations.apply(result, "" if subject is None else version_of(subject))
    report.results.append(applied)
    if listen is not None:
        listen(applied, done, total)


def _found(ref: str, plan: Plan) -> tuple[Subject | None, str]:
    """The subject, or why there is none; an installed plugin is not loaded in this process when it can be avoided."""
    try:
        subject = resolve(ref, plan.options)
        subject.expected_file = plan.expected or subject.expected_file
        subject.spec  # noqa: B018  # loads the plugin: an unknown name must be told from a failed check
    except Exception as error:  # noqa: BLE001  # whatever a plugin raises becomes a failed S-01
        return None, str(error)
    return subject, ""


def expectations_of(subject: Subject | None) -> Expectations:
    """What is expected and declared for a compressor: its conformance.toml, and its plugin's hook."""
    if subject is None:
        return Expectations()
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


def _begin(plan: Plan, subjects: Iterable[tuple[Subject | None, str]]) -> Report:
    described = [_describe(ref, subject) for ref, (subject, _) in zip(plan.refs, subjects, strict=True)]
    required = [check.id for check in all_checks().values() if check.tier in CERTIFYING_TIERS]
    facts = run_facts(plan.seed, plan.model)
    return Report(new_header(described, plan.checks, facts, required))


def _describe(ref: str, subject: Subject | None) -> dict[str, Any]:
    if subject is None:
        return {"name": ref, "ref": ref, "loaded": False}
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
