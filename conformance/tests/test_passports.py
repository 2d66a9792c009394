"""Passports: what the registry shows, when they stop counting, and what the engine refuses."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vericache_conform import signing
from vericache_conform.cli.main import main
from vericache_conform.facts import run_facts
from vericache_conform.outcome import Result
from vericache_conform.passports import write_passports
from vericache_conform.report.model import Report, new_header
from vericache_core.errors import ConformanceRequiredError, MissingDependencyError, UsageError
from vericache_core.plugins import passport as core
from vericache_core.plugins.registry import Registry
from vericache_core.plugins.testing import on_path, write_distribution

SOURCE = """
raise AssertionError("listing must not import this")
"""


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


def test_signing_without_cryptography_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)  # as if it were not there
    with pytest.raises(MissingDependencyError, match="cryptography"):
        signing.make_keys(tmp_path)
    assert signing.verify({}, tmp_path / "key") == "unsigned"


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    pytest.importorskip("cryptography")
    folder = tmp_path / "keys"
    folder.mkdir()
    return signing.make_keys(folder)


@pytest.fixture
def signed(site: Path, keys: tuple[Path, Path]) -> Path:
    """The file of a signed passport."""
    write_passports(report(), keys[0])
    path = core.passport_path("vericache_compressor_mine")
    assert path is not None
    return path


def verdict(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["passport", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_sign_and_verify_with_the_trusted_key(
    signed: Path, keys: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    private, public = keys
    assert oct(private.stat().st_mode)[-3:] == "600"
    assert b"PRIVATE" not in public.read_bytes()
    assert core.read_passport(signed)["signature"]["algorithm"] == "ed25519"
    assert Registry().conformance("mine").signed
    assert standing()[0] == "conformant"
    code, facts = verdict(["verify", "mine", "--key", str(public)], capsys)
    assert (code, facts["signature"], facts["standing"]) == (0, "valid", "conformant")


def test_the_key_of_somebody_else_is_not_trusted(signed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, facts = verdict(["keygen", str(tmp_path)], capsys)
    assert code == 0
    code, facts = verdict(["verify", "mine", "--key", facts["public_key"]], capsys)
    assert (code, facts["signature"]) == (1, "signed with another key")


@pytest.mark.parametrize("key", ["digest", "version", "results", "compressors", "platform", "issued"])
def test_a_tampered_passport_is_forged(
    key: str, signed: Path, keys: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    passport = core.read_passport(signed)
    changed = {"compressors": {"mine": "certified", "other": "certified"}, "results": {"C-01": "pass", "C-02": "pass"}}
    signed.write_text(json.dumps({**passport, key: changed.get(key, "x" * 64)}))
    code, facts = verdict(["verify", "mine", "--key", str(keys[1])], capsys)
    assert (code, facts["signature"]) == (1, "forged")


@pytest.mark.parametrize("change", [{"value": "00" * 64}, {"value": "no hex"}, {"value": None}])
def test_a_signature_that_does_not_fit_is_forged(change: dict[str, Any], signed: Path, keys: tuple[Path, Path]) -> None:
    passport = core.read_passport(signed)
    assert signing.verify(passport, keys[1]) == "valid"
    assert signing.verify({**passport, "signature": {**passport["signature"], **change}}, keys[1]) == "forged"
    assert signing.verify({**passport, "signature": "yes"}, keys[1]) == "signed with another key"


def test_no_key_leaves_it_unsigned(site: Path, keys: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    write_passports(report())
    assert not Registry().conformance("mine").signed
    code, facts = verdict(["verify", "mine", "--key", str(keys[1])], capsys)
    assert (code, facts["signature"], facts["standing"]) == (1, "unsigned", "conformant")
    code, facts = verdict(["sign", "mine", "--key", str(keys[0])], capsys)
    assert code == 0
    assert verdict(["verify", "mine", "--key", str(keys[1])], capsys)[0] == 0


def test_what_is_no_key_is_refused_by_name(signed: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "junk.pem").write_text("junk")
    for path in (tmp_path / "junk.pem", tmp_path / "nowhere.pem"):
        with pytest.raises(UsageError, match=path.name):
            signing.sign_file(signed, path)
        with pytest.raises(UsageError, match=path.name):
            signing.verify(core.read_passport(signed), path)
    with pytest.raises(UsageError, match="keys are never overwritten"):
        signing.make_keys(keys[0].parent)
    with pytest.raises(UsageError, match="no folder"):
        signing.make_keys(tmp_path / "nowhere")
