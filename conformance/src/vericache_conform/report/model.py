"""A report: header, results, footer. Without a footer it is not finished, and nothing takes it for finished."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from vericache_conform.outcome import OUTCOMES, Result
from vericache_core.errors import UsageError

SCHEMA: Final = "vericache-conform.report/1"
TIMES: Final = ("started", "finished", "seconds")
"""Keys that hold times, at any depth and as the ending of a key: all that may differ between two equal runs."""
CERTIFYING_TIERS: Final = ("static", "contract", "runtime")


@dataclass
class Report:
    """See the module docstring.

    Attributes:
        header: versions, machine, seed, subjects.
        results: in the order in which they came.
        footer: counts and verdict; empty until the run is over.
    """

    header: dict[str, Any]
    results: list[Result] = field(default_factory=list)
    footer: dict[str, Any] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return bool(self.footer)

    @property
    def passed(self) -> bool:
        """Whether the run is over and nothing in it is bad."""
        return self.complete and not any(result.bad for result in self.results)

    @property
    def subjects(self) -> list[str]:
        return [entry["name"] for entry in self.header.get("subjects", [])]

    def of(self, subject: str) -> list[Result]:
        return [result for result in self.results if result.subject == subject]

    def counts(self, subject: str | None = None) -> dict[str, int]:
        """How many results have each outcome."""
        found = Counter(result.outcome for result in self.results if subject in (None, result.subject))
        return {outcome: found[outcome] for outcome in OUTCOMES}

    def level(self, subject: str) -> str:
        """``certified``, ``passed`` or ``failed``.

        Certified means that every check of the static, contract and runtime tiers ran, and that each passed or
        is skipped because of what the descriptor itself declares.
        """
        results = self.of(subject)
        if not results or any(result.bad for result in results):
            return "failed"
        return "passed" if self.short_of_certified(subject) else "certified"

    def short_of_certified(self, subject: str) -> list[str]:
        """What keeps a passing subject from being certified."""
        ran = {result.check for result in self.of(subject)}
        missing = [one for one in self.header.get("required", []) if one not in ran]
        reasons = [f"{one} did not run" for one in missing]
        for result in self.of(subject):
            if result.outcome == "skip" and not result.declared:
                reasons.append(f"{result.check} was skipped: {result.message}")
            elif result.outcome == "xfail":
                reasons.append(f"{result.check} is an expected failure")
        return reasons

    def summary(self) -> str:
        """The last line of every run. Expected failures count as skipped, unexpected passes as failed."""
        counts = self.counts()
        failed = counts["fail"] + counts["error"] + counts["xpass"]
        return f"{counts['pass']} passed, {failed} failed, {counts['skip'] + counts['xfail']} skipped"

    def finish(self, status: int, seconds: float) -> dict[str, Any]:
        """Write the footer: from here on the report is complete."""
        self.footer = {
            "kind": "footer",
            "results": len(self.results),
            "counts": self.counts(),
            "levels": {name: self.level(name) for name in self.subjects},
            "short_of_certified": {name: self.short_of_certified(name) for name in self.subjects},
            "summary": self.summary(),
            "exit_status": status,
            "finished": _now(),
            "seconds": round(seconds, 3),
        }
        return self.footer

    def lines(self) -> Iterable[str]:
        """The report as JSON lines."""
        yield dump(self.header)
        for result in self.results:
            yield dump(line_of(result))
        if self.footer:
            yield dump(self.footer)


def new_header(
    subjects: Sequence[Mapping[str, Any]], checks: Sequence[Any], facts: Mapping[str, Any], required: Sequence[str]
) -> dict[str, Any]:
    """The first line of a report."""
    return {
        "kind": "header",
        "schema": SCHEMA,
        **facts,
        "subjects": [dict(subject) for subject in subjects],
        "checks": [check.id for check in checks],
        "required": list(required),
        "started": _now(),
    }


def line_of(result: Result) -> dict[str, Any]:
    """The line of one result."""
    return {"kind": "result", **result.to_json()}


def dump(line: Mapping[str, Any]) -> str:
    """One line, keys sorted, no NaN."""
    return json.dumps(line, sort_keys=True, ensure_ascii=False, default=str)


def read_report(path: str | Path) -> Report:
    """Read a report file.

    Raises:
        UsageError: no such file, not a report, of another schema, or not finished (a killed run).
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"report {str(path)!r} cannot be read", cause=str(error)) from error
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            parsed = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{path}:{number}: not a line of a report", cause=str(error)) from error
        if not isinstance(parsed, dict):
            raise UsageError(f"{path}:{number}: not a line of a report")
        lines.append(parsed)
    if not lines or lines[0].get("kind") != "header":
        raise UsageError(f"{path} is not a report of vericache-conform", cause="its first line is no header")
    if lines[0].get("schema") != SCHEMA:
        raise UsageError(
            f"{path} has schema {lines[0].get('schema')!r}", hint=f"this version reads {SCHEMA}; run the suite again"
        )
    if lines[-1].get("kind") != "footer" or lines[-1].get("results") != len(lines) - 2:
        raise UsageError(f"{path} is not complete", cause="it has no footer that counts its results: the run was stopped")
    return Report(lines[0], [Result.from_json(line) for line in lines[1:-1]], lines[-1])


def without_times(value: Any) -> Any:
    """The same JSON value without anything that is a time."""
    if isinstance(value, Mapping):
        return {
            key: without_times(item) for key, item in value.items() if not any(key == t or key.endswith(f"_{t}") for t in TIMES)
        }
    if isinstance(value, (list, tuple)):
        return [without_times(item) for item in value]
    return value


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
