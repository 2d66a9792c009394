"""The door for pytest: one test per check, with the ids that the command line and the API use.

A function::

    from vericache_conform import parametrize_with_checks

    @parametrize_with_checks("mine")
    def test_conformance(check):
        check()

or a class::

    from vericache_conform import CompressorConformance

    class TestMine(CompressorConformance):
        compressor = "mine"
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import pytest

from vericache_conform.api import as_subject
from vericache_conform.catalogue import select
from vericache_conform.check import Check, Tier
from vericache_conform.execute import Settings, execute
from vericache_conform.runner import expectations_of
from vericache_conform.subject import Subject, version_of
from vericache_core.plugins.spec import CompressorSpec

F = TypeVar("F", bound=Callable[..., Any])
DEFAULT_TIERS: tuple[Tier, ...] = ("static", "contract")


class BoundCheck:
    """One check on one compressor; calling it passes, fails, skips or xfails the running test."""

    def __init__(self, check: Check, subject: Subject, seed: int = 0) -> None:
        self.check, self.subject, self.seed = check, subject, seed

    def __repr__(self) -> str:
        return f"{self.check.id}[{self.subject.name}]"

    def __call__(self) -> None:
        __tracebackhide__ = True
        expectations = expectations_of(self.subject)
        settings = Settings(self.seed, declared={self.subject.name: expectations.declared})
        result = expectations.apply(execute(self.check, self.subject, settings), version_of(self.subject))
        if result.outcome == "skip":
            pytest.skip(result.message)
        if result.outcome == "xfail":
            pytest.xfail(result.message)
        if result.bad:
            more = "" if result.example is None else f"\nexample: {dict(result.example)}"
            pytest.fail(f"{result.check} {result.outcome}: {result.message}{more}\nfix: {self.check.fix}", pytrace=False)


def bound_checks(
    compressor: CompressorSpec | str,
    tiers: Sequence[Tier] = DEFAULT_TIERS,
    checks: Iterable[str] = (),
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> list[BoundCheck]:
    """The checks of these tiers (or with these ids), bound to one compressor."""
    subject = as_subject(compressor, options)
    return [BoundCheck(check, subject, seed) for check in select(tiers, checks)]


def parametrize_with_checks(
    compressor: CompressorSpec | str,
    *,
    tiers: Sequence[Tier] = DEFAULT_TIERS,
    checks: Iterable[str] = (),
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Callable[[F], F]:
    """Run the decorated test once per check; it receives the check as ``check`` and should call it.

    Args:
        compressor: an installed name, ``module:SPEC`` or a descriptor.
        tiers: which checks; default static and contract.
        checks: ids, to run just these.
        options: fixed options of the compressor.
        seed: of everything that is drawn.
    """
    bound = bound_checks(compressor, tiers, checks, options, seed)
    parameters = [pytest.param(one, id=one.check.id, marks=pytest.mark.vericache_check(one.check.id)) for one in bound]

    def decorate(function: F) -> F:
        marked: F = pytest.mark.parametrize("check", parameters)(function)
        return marked

    return decorate


class CompressorConformance:
    """Base of a test class: set ``compressor``, and ``tiers`` or ``options`` where the defaults do not do.

    ``test_check`` may not be overridden: what is known to fail belongs into ``conformance.toml``, with a reason.
    """

    compressor: ClassVar[CompressorSpec | str]
    tiers: ClassVar[Sequence[Tier]] = DEFAULT_TIERS
    options: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "test_check" in vars(cls):
            raise TypeError(f"{cls.__name__} may not override test_check; list expected failures in conformance.toml")
        if isinstance(getattr(cls, "compressor", None), (str, CompressorSpec)):
            made = parametrize_with_checks(cls.compressor, tiers=cls.tiers, options=cls.options)
            cls.test_check = made(_run)  # type: ignore[attr-defined]  # each subclass has its own parameters


def _run(self: CompressorConformance, check: BoundCheck) -> None:  # noqa: ARG001  # a method
    check()
