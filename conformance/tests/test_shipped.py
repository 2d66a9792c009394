"""The compressors of this repository pass, with no skip that they do not declare."""

from __future__ import annotations

import importlib.util

import pytest

from vericache_conform.catalogue import select
from vericache_conform.execute import Settings, execute
from vericache_conform.runner import Plan, expectations_of, run_isolated
from vericache_conform.subject import resolve

SHIPPED = [
    name for name in ("snapkv", "kivi", "kvzip", "turboquant") if importlib.util.find_spec(f"vericache_compressor_{name}")
]
QUICK = {"C-01", "C-03", "C-04", "C-06", "C-10", "C-12", "C-13", "C-15", "C-18", "S-01", "S-04", "S-08"}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_sample_of_the_contract(name: str) -> None:
    subject = resolve(name)
    settings = Settings(declared={name: expectations_of(subject).declared})
    results = [execute(check, subject, settings) for check in select(["static", "contract"]) if check.id in QUICK]
    assert [f"{r.check}: {r.message}" for r in results if r.bad or (r.outcome == "skip" and not r.declared)] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_certified(name: str) -> None:
    report = run_isolated(Plan([name], select()))
    report.finish(0, 0.0)
    assert [f"{r.check}: {r.message}" for r in report.results if r.bad] == []
    assert report.short_of_certified(name) == []
