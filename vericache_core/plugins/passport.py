"""The conformance passport: what ``vericache-conform`` found out, bound to the very files it looked at.

A passport is a JSON file inside the plugin's package, so it travels in the wheel. Reading it imports nothing of
the plugin: its package is only located. It counts as long as every file, the versions and the platform are those
it was written for.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from vericache_core.plugins.spec import SUPPORTED_API_VERSIONS

FILE: Final = "conformance-passport.json"
SCHEMA: Final = "vericache-conform.passport/1"
SUITE: Final = "vericache-conform"
Standing = Literal["conformant", "stale", "failed", "unverified"]
_IGNORED: Final = ("__pycache__",)


@dataclass(frozen=True, slots=True)
class Conformance:
    """What the passport of a plugin says today.

    Attributes:
        standing: ``conformant``; ``stale`` (files, versions or platform changed); ``failed`` (the run did not
            reach the level ``certified``); ``unverified`` (no passport, or one that cannot be read).
        detail: suite version and place, or the reason.
        signed: whether the passport carries a signature; nobody has checked it yet.
    """

    standing: Standing
    detail: str = ""
    signed: bool = False

    def __str__(self) -> str:
        return f"{self.standing} {self.detail}" if self.standing == "conformant" else self.standing


def package_root(module: str) -> Path | None:
    """Folder of the top-level package of ``module``, or its file; located without importing anything."""
    try:
        spec = importlib.util.find_spec(module.partition(".")[0])
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return None if spec.origin is None or not Path(spec.origin).is_file() else Path(spec.origin)


def passport_path(module: str) -> Path | None:
    """Where the passport of the package around ``module`` lies or would lie."""
    root = package_root(module)
    if root is None:
        return None
    return root / FILE if root.is_dir() else root.with_name(f"{root.stem}.{FILE}")


def digest_of(module: str) -> str | None:
    """SHA-256 over the names and contents of all files of the package around ``module``; None when there is none.

    Compiled files and the passport itself do not count.
    """
    root = package_root(module)
    if root is None:
        return None
    if root.is_file():
        files = {root.name: root}
    else:
        found = (path for path in root.rglob("*") if path.is_file())
        files = {path.relative_to(root).as_posix(): path for path in found if not _ignored(path.relative_to(root))}
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{hashlib.sha256(files[name].read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def here() -> str:
    """The platform that passports are bound to."""
    return f"{platform.system()}-{platform.machine()}".lower()


def standing_of(name: str, module: str, version: str) -> Conformance:
    """What the passport of compressor ``name``, whose entry point lies in ``module``, says today."""
    path = passport_path(module)
    if path is None or not path.is_file():
        return Conformance("unverified", "no passport")
    try:
        passport = read_passport(path)
    except ValueError as error:
        return Conformance("unverified", f"passport cannot be read: {error}")
    signed = bool(passport.get("signature"))
    entry = passport["compressors"].get(name)
    if entry is None:
        return Conformance("unverified", f"the passport does not cover {name!r}", signed)
    if entry != "certified":
        return Conformance("failed", f"the last run ended with {entry!r}", signed)
    changed = _changed(passport, module, version)
    if changed:
        return Conformance("stale", changed, signed)
    place = f"{passport['device']}, {', '.join(passport['dtypes'])}"
    return Conformance("conformant", f"{passport['suite']} ({place})", signed)


def read_passport(path: Path) -> dict[str, Any]:
    """A passport's content.

    Raises:
        ValueError: not a passport, or of another schema.
    """
    try:
        passport = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(str(error)) from error
    if not isinstance(passport, dict) or passport.get("schema") != SCHEMA:
        raise ValueError(f"its schema is not {SCHEMA}")
    kinds = {"compressors": dict, "digest": str, "version": str, "suite": str, "platform": str, "api_version": int}
    kinds |= {"device": str, "dtypes": list}
    for key, kind in kinds.items():
        if not isinstance(passport.get(key), kind):
            raise ValueError(f"{key} is missing or malformed")  # noqa: TRY004  # one error for every malformed passport
    return passport


def signed_bytes(passport: Mapping[str, Any]) -> bytes:
    """The bytes that a signature covers: everything but the signature."""
    plain = {key: value for key, value in passport.items() if key != "signature"}
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()


def _changed(passport: Mapping[str, Any], module: str, version: str) -> str:
    """What is no longer as the passport says, or an empty string."""
    if passport["digest"] != digest_of(module):
        return "files of the package changed"
    if passport["version"] != version:
        return f"certified version {passport['version']}, installed {version}"
    if passport["api_version"] not in SUPPORTED_API_VERSIONS:
        return f"certified for API version {passport['api_version']}"
    if passport["platform"] != here():
        return f"certified on {passport['platform']}, this is {here()}"
    try:
        suite = importlib.metadata.version(SUITE)
    except importlib.metadata.PackageNotFoundError:
        return ""
    if suite.split(".")[:2] != passport["suite"].split(".")[:2]:
        return f"certified by suite {passport['suite']}, installed {suite}"
    return ""


def _ignored(path: Path) -> bool:
    return path.name == FILE or path.suffix in (".pyc", ".pyo") or any(part in _IGNORED for part in path.parts)
