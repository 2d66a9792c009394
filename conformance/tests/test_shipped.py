"""The compressors of this repository pass, with no skip that they do not declare."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from vericache_conform.case import Case
from vericache_conform.catalogue import find_check, select
from vericache_conform.execute import Settings, execute
from vericache_conform.runner import Plan, expectations_of, run_isolated
from vericache_conform.subject import Subject, is_budget, load_object, resolve
from vericache_core.plugins.registry import Registry

SHIPPED = [
    name for name in ("snapkv", "kivi", "kvzip", "turboquant") if importlib.util.find_spec(f"vericache_compressor_{name}")
]
COMPOSED = ["snapkv+kivi"] if {"snapkv", "kivi"} <= set(SHIPPED) else []
QUICK = {"C-01", "C-03", "C-04", "C-06", "C-10", "C-12", "C-13", "C-15", "C-18", "S-01", "S-04", "S-08"}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_sample_of_the_contract(name: str) -> None:
    subject = resolve(name)
    settings = Settings(declared={name: expectations_of(subject).declared})
    results = [execute(check, subject, settings) for check in select(["static", "contract"]) if check.id in QUICK]
    assert [f"{r.check}: {r.message}" for r in results if r.bad or (r.outcome == "skip" and not r.declared)] == []


@pytest.mark.skipif("snapkv" not in SHIPPED, reason="needs snapkv")
def test_payloads_are_judged_alike_whatever_the_thread_count() -> None:
    """The process that rebuilds has one thread; the one that compares may have more, and torch splits products by it."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        result = execute(find_check("C-09"), resolve("snapkv"), Settings())
    finally:
        torch.set_num_threads(before)
    assert result.outcome == "pass", result.message


@pytest.mark.skipif(not COMPOSED, reason="needs both compressors")
def test_a_sample_of_the_contract_on_a_composition() -> None:
    subject = resolve("snapkv+kivi")
    assert subject.option_sets()[1:] == [
        {f"{part}.{key}": value for key, value in options.items()}
        for part in ("snapkv", "kivi")
        for options in resolve(part).option_sets()[1:]
    ]
    settings = Settings(declared={subject.name: expectations_of(subject).declared})
    assert settings.declared == {
        subject.name: {"max_relative_error": expectations_of(resolve("kivi")).declared["max_relative_error"]}
    }
    results = {
        check.id: execute(check, subject, settings)
        for check in select(["static", "contract"])
        if check.id in QUICK | {"S-02", "C-02"}
    }
    assert [f"{r.check}: {r.message}" for r in results.values() if r.bad] == []
    assert {r.check for r in results.values() if r.outcome == "skip"} == {"C-02", "C-04"}  # its kind says so
    assert all(r.declared for r in results.values() if r.outcome == "skip")
    assert results["S-02"].facts["distribution"] == "vericache-compressor-snapkv + vericache-compressor-kivi"
    assert {32, 128} <= set(Case(subject).landmarks)  # the window of one, the residual of the other


@pytest.mark.skipif(not COMPOSED, reason="needs both compressors")
def test_budgets_of_a_part_are_left_out_of_option_sets_when_one_is_fixed() -> None:
    free, fixed = resolve("snapkv+kivi"), resolve("snapkv+kivi", {"snapkv.keep": 0.2})
    assert any(is_budget(key) for options in free.option_sets() for key in options)
    assert not any(is_budget(key) for options in fixed.option_sets() for key in options)


def test_the_window_of_a_composed_dropper_is_checked() -> None:
    """C-03 asks the part that drops tokens what it promises."""
    registry = Registry(discover=False)
    registry.register(load_object("vericache_conform.mutants.maps:DROPS_WINDOW"))
    registry.register(load_object("vericache_conform.mutants.healthy:QUANT"))
    found = execute(find_check("C-03"), Subject("drops-window+healthy-quant", registry, None), Settings())
    assert found.outcome == "fail"
    assert "protected tokens are gone" in found.message


@pytest.mark.slow
@pytest.mark.parametrize("name", [*SHIPPED, *COMPOSED])
def test_certified(name: str) -> None:
    report = run_isolated(Plan([name], select()))
    report.finish(0, 0.0)
    assert [f"{r.check}: {r.message}" for r in report.results if r.bad] == []
    assert report.short_of_certified(name) == []
