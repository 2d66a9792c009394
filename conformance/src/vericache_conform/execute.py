"""Run one check and name its outcome. Nothing that a check or a compressor does escapes."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vericache_conform.case import Case
from vericache_conform.check import ANY, Check
from vericache_conform.outcome import Evidence, Example, Failure, Result, Skip, Unable
from vericache_conform.subject import Subject
from vericache_core.errors import VeriCacheError


@dataclass(frozen=True)
class Settings:
    """What holds for a whole run.

    Attributes:
        seed: of everything that is drawn.
        model: the real model of the model tier.
        declared: per compressor what its author declares (error bound, floors).
        timeout_factor: multiplies every limit of time.
    """

    seed: int = 0
    model: str = "demo"
    declared: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    timeout_factor: float = 1.0


def execute(check: Check, subject: Subject, settings: Settings, only: Example | None = None) -> Result:
    """The outcome of ``check`` on ``subject``; with ``only`` just that example is tried."""
    case = Case(
        subject,
        seed=settings.seed,
        tier=check.tier,
        only=only,
        model=settings.model,
        declared=settings.declared.get(subject.name, {}),
        timeout_factor=settings.timeout_factor,
    )
    started = time.perf_counter()
    result = _run(check, case)
    return Result(
        **{
            **_fields(result),
            "seconds": round(time.perf_counter() - started, 3),
            "reproduce": _command(check, subject, settings),
        }
    )


def _run(check: Check, case: Case) -> Result:
    name = case.subject.name
    try:
        if check.id != "S-01":
            _applies(check, case.subject)
        evidence = check.function(case)
        shown: object = evidence  # a check is written by people: what its type promises is tested here
        if not isinstance(shown, Evidence) or shown.tried < 1:
            return Result(check.id, name, "error", "the check ended without having tried anything")
        return Result(check.id, name, "pass", tried=evidence.tried, facts={**case.facts, **evidence.facts})
    except Skip as skip:
        return Result(check.id, name, "skip", skip.reason, declared=skip.declared)
    except Failure as failure:
        facts = {**case.facts, **failure.facts}
        return Result(check.id, name, "fail", failure.message, example=failure.example, facts=facts)
    except Unable as error:
        return Result(check.id, name, "error", str(error))
    except MemoryError:
        return Result(check.id, name, "error", "out of memory")
    except RecursionError as error:
        return Result(check.id, name, "error", f"RecursionError: {error}")
    except Exception as error:  # noqa: BLE001  # the boundary of a check
        where = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error).strip().splitlines()[:1] or [""]
        return Result(check.id, name, "error", f"{type(error).__name__}: {text[0]} ({where.filename}:{where.lineno})")


def _applies(check: Check, subject: Subject) -> None:
    try:
        spec = subject.spec
    except VeriCacheError as error:
        raise Skip("the compressor does not load, see S-01") from error
    if spec.kind not in check.kinds:
        raise Skip(f"for {' and '.join(sorted(check.kinds))}; this is {spec.kind}", declared=True)
    if check.capability != ANY and spec.capability(check.capability) == "no":
        raise Skip(f"the capability {check.capability!r} is declared as no", declared=True)


def _fields(result: Result) -> dict[str, Any]:
    return {name: getattr(result, name) for name in Result.__dataclass_fields__}


def _command(check: Check, subject: Subject, settings: Settings) -> str:
    parts = ["vericache-conform run", subject.ref or subject.name, "--check", check.id]
    parts += [f"-o {key}={value}" for key, value in subject.options.items()]
    parts += [f"--seed {settings.seed}"] if settings.seed else []
    parts += [f"--model {settings.model}"] if check.tier == "model" and settings.model != "demo" else []
    return " ".join(parts)
