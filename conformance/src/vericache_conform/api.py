"""The door for programs: ``check_compressor(spec) -> Report``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vericache_conform.catalogue import select
from vericache_conform.check import Tier
from vericache_conform.execute import Settings
from vericache_conform.report.model import Report
from vericache_conform.runner import run_inline
from vericache_conform.subject import Subject, of_spec, resolve
from vericache_core.plugins.spec import CompressorSpec


def check_compressor(
    compressor: CompressorSpec | str,
    *,
    tiers: Sequence[Tier] = (),
    checks: Iterable[str] = (),
    budget: float | None = None,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    model: str = "demo",
) -> Report:
    """Check one compressor in this process.

    Args:
        compressor: a descriptor, or a reference such as an installed name or ``module:SPEC``.
        tiers: which to run; default static, contract and runtime.
        checks: ids, to run just these.
        budget: seconds; the checks whose recorded cost fits are run.
        options: fixed options of the compressor.
        seed: of everything that is drawn.
        model: real model of the model tier.

    Returns:
        A complete report; ``report.passed`` says whether nothing failed.

    Raises:
        UsageError: an unknown check, or a malformed reference.
    """
    return run_inline(as_subject(compressor, options), select(tiers, checks, budget), Settings(seed, model))


def as_subject(compressor: CompressorSpec | str, options: Mapping[str, Any] | None = None) -> Subject:
    """The subject that a descriptor or a reference stands for."""
    return resolve(compressor, options) if isinstance(compressor, str) else of_spec(compressor, options)
