"""Passports: what the registry shows, when they stop counting, and what the engine refuses."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vericache_conform import signing
from vericache_conform.facts import run_facts
from vericache_conform.outcome import Result
from vericache_conform.passports import write_passports
from vericache_conform.report.model import Report, new_header
from vericache_core.errors import ConformanceRequiredError, MissingDependencyError
from vericache_core.plugins import passport as core
from vericache_core.plugins.registry import Registry
from vericache_core.plugins.testing import on_path, write_distribution

SOURCE = """
raise AssertionError("listing must not import this")
"""
HAVE_CRYPTOGRAPHY = importlib.util.find_spec("cryptography") is not None


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "site"
    folder.mkdir()
    modules = {"vericache_compressor_mine/__init__": SOURCE, "vericache_compressor_mine/other": "x = 1\n"}
    write_distribution(folder, "vericache-compressor-mine", {"mine": "vericache_compressor_mine"}, modules)
    with on_path(folder):
        yield folder


def report(outcome: Any = "pass", required: tuple[str, ...] = ("C-01",)) -> Report:
    subject = {
        "name": "mine",
        "loaded": True,
        "distribution": "vericache-compressor-mine",
        "version": "0.1",
        "options": {},
    }
    made = Report(new_header([subject], [], run_facts(0, "demo"), required), [Result("C-01", "mine", outcome)])
    made.finish(0, 1.0)
    return made


def standing() -> tuple[str, str]:
    found = Registry().conformance("mine")
    listed = next(info.conformance for info in Registry().list_plugins() if info.name == "mine")
    assert listed == str(found)
    return found.standing, found.detail


def test_from_unverified_to_conformant_to_stale(site: Path) -> None:
    assert standing() == ("unverified", "no passport")
    (line,) = write_passports(report())
    assert "(certified)" in line
    assert standing()[0] == "conformant"
    assert "(cpu, float32" in standing()[1]
    module = site / "vericache_compressor_mine" / "other.py"
    text = module.read_text()
    module.write_text(text + "# changed\n")
    assert standing() == ("stale", "files of the package changed")
    module.write_text(text)
    (site / "vericache_compressor_mine" / "__pycache__").mkdir()
    (site / "vericache_compressor_mine" / "__pycache__" / "x.pyc").touch()
    assert standing()[0] == "conformant"
    (site / "vericache_compressor_mine" / "new.py").touch()
    assert standing()[0] == "stale"


@pytest.mark.parametrize(
    ("key", "value", "expected", "words"),
    [
        ("version", "0.0.9", "stale", "certified version 0.0.9"),
        ("platform", "plan9-vax", "stale", "certified on plan9-vax"),
        ("api_version", 77, "stale", "API version 77"),
        ("suite", "9.9.9", "stale", "suite 9.9.9"),
        ("schema", "other/1", "unverified", "schema"),
        ("digest", 3, "unverified", "digest"),
        ("compressors", {"other": "certified"}, "unverified", "does not cover"),
    ],
)
def test_what_a_passport_is_bound_to(key: str, value: Any, expected: str, words: str, site: Path) -> None:
    write_passports(report())
    path = core.passport_path("vericache_compressor_mine")
    assert path is not None
    passport = json.loads(path.read_text())
    path.write_text(json.dumps({**passport, key: value}))
    found, detail = standing()
    assert found == expected
    assert words in detail


def test_a_run_that_falls_short_is_shown_as_failed(site: Path) -> None:
    write_passports(report("fail"))
    assert standing() == ("failed", "the last run ended with 'failed'")
    write_passports(report("pass", required=("C-01", "C-02")))
    assert standing() == ("failed", "the last run ended with 'passed'")
    path = core.passport_path("vericache_compressor_mine")
    assert path is not None
    path.write_text("{")
    assert standing()[0] == "unverified"


def test_no_passport_for_fixed_options_or_without_a_package(site: Path) -> None:
    made = report()
    made.header["subjects"][0]["options"] = {"keep": 1}
    assert "fixed with -o" in write_passports(made)[0]
    made.header["subjects"][0] |= {"options": {}, "distribution": None}
    assert "not installed" in write_passports(made)[0]
    assert standing()[0] == "unverified"


def test_the_engine_refuses_what_is_not_conformant() -> None:
    from vericache_conform import models
    from vericache_core.config import EngineConfig
    from vericache_core.engine import Engine

    config = EngineConfig(compressor="random", require_conformant=True, rows=16, probe=False)
    with pytest.raises(ConformanceRequiredError, match="compressor 'random' is unverified") as caught:
        Engine(models.build("llama", 32), None, config)
    assert "vericache-conform run random --passport" in str(caught.value)


@pytest.mark.skipif(HAVE_CRYPTOGRAPHY, reason="cryptography is installed")
def test_signing_without_cryptography_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(MissingDependencyError, match="cryptography"):
        signing.make_keys(tmp_path)
    assert signing.verify({}, tmp_path / "key") == "unsigned"


@pytest.mark.skipif(not HAVE_CRYPTOGRAPHY, reason="needs cryptography")
def test_signatures(site: Path, tmp_path: Path) -> None:
    private, public = signing.make_keys(tmp_path)
    (tmp_path / "other").mkdir()
    _, stranger = signing.make_keys(tmp_path / "other")
    write_passports(report())
    path = core.passport_path("vericache_compressor_mine")
    assert path is not None
    assert signing.verify(core.read_passport(path), public) == "unsigned"
    signing.sign_file(path, private)
    signed = core.read_passport(path)
    assert Registry().conformance("mine").signed
    assert standing()[0] == "conformant"
    assert signing.verify(signed, public) == "valid"
    assert signing.verify(signed, stranger) == "signed with another key"
    assert signing.verify({**signed, "digest": "0"}, public) == "forged"
    assert oct(private.stat().st_mode)[-3:] == "600"
