"""Write passports for what a run found out. Reading them is the core's business (``vericache_core.plugins.passport``)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vericache_conform.report.model import Report
from vericache_conform.report.write import write_whole
from vericache_conform.signing import sign_file
from vericache_conform.subject import resolve
from vericache_core.errors import UsageError
from vericache_core.plugins.passport import SCHEMA, digest_of, passport_path, read_passport


def write_passports(report: Report, key: Path | None = None) -> list[str]:
    """Write a passport into the package of every installed compressor of a complete report; returns what was done.

    A run that did not reach ``certified`` writes that too: the registry then shows ``failed``.

    Raises:
        UsageError: a package cannot be written to.
    """
    return [_write(report, entry, key) for entry in report.header["subjects"]]


def _write(report: Report, entry: dict[str, Any], key: Path | None) -> str:
    name = entry["name"]
    if not entry["loaded"] or entry["distribution"] is None:
        return f"{name}: no passport, because it is not installed as a package"
    if entry["options"]:
        return f"{name}: no passport, because options were fixed with -o"
    module = next(info.target for info in resolve(name).registry.list_plugins() if info.name == name).partition(":")[0]
    path = passport_path(module)
    if path is None:
        raise UsageError(f"{name}: its package cannot be located")
    passport = _passport(report, entry, digest_of(module))
    if path.is_file():
        passport["compressors"] = {**_others(path, passport), **passport["compressors"]}
    write_whole(path, json.dumps(passport, indent=2, sort_keys=True) + "\n")
    if key is not None:
        sign_file(path, key)
    level = passport["compressors"][name]
    return f"{name}: passport {'signed and ' if key else ''}written to {path} ({level})"


def _passport(report: Report, entry: dict[str, Any], digest: str | None) -> dict[str, Any]:
    header = report.header
    return {
        "schema": SCHEMA,
        "distribution": entry["distribution"],
        "version": entry["version"],
        "digest": digest,
        "compressors": {entry["name"]: report.level(entry["name"])},
        "suite": header["suite"],
        "core": header["core"],
        "api_version": header["api_version"],
        "platform": header["platform"],
        "python": header["python"],
        "packages": header["packages"],
        "device": header["device"],
        "dtypes": header["dtypes"],
        "seed": header["seed"],
        "results": {result.check: result.outcome for result in report.of(entry["name"])},
        "issued": report.footer["finished"],
    }


def _others(path: Path, passport: dict[str, Any]) -> dict[str, str]:
    """Verdicts of other compressors of the same package, as long as they are about the same files and suite."""
    try:
        old = read_passport(path)
    except ValueError:  # replaced by the new one
        return {}
    same = all(old[key] == passport[key] for key in ("digest", "version", "suite", "platform"))
    return dict(old["compressors"]) if same else {}
