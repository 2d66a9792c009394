"""``conformance.toml``: what a plugin's author knows to fail, and what they declare. Strict in both directions."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from packaging.version import InvalidVersion, Version

from vericache_conform.outcome import Result
from vericache_core.errors import ConfigError
from vericache_core.plugins.fields import did_you_mean

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE: Final = "conformance.toml"
STATES: Final = ("regression", "unsupported", "planned")
KEYS: Final = ("id", "state", "reason", "issue", "expires")
DECLARED: Final = ("max_relative_error", "min_acceptance", "max_bytes_share")
_LEVELS_UP = 5


@dataclass(frozen=True)
class Expected:
    """One check that is known to fail.

    Attributes:
        id: of the check.
        state: ``regression`` (worked before), ``unsupported`` (will not work), ``planned`` (not yet).
        reason: why, in one line.
        issue: where it is followed up.
        expires: version of the plugin from which on the entry no longer counts.
    """

    id: str
    state: str
    reason: str
    issue: str = ""
    expires: str = ""


@dataclass(frozen=True)
class Expectations:
    """Content of one file; ``path`` is empty when there is none."""

    path: str = ""
    expected: Mapping[str, Expected] = field(default_factory=dict)
    declared: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """JSON types; :meth:`from_json` gives an equal object back."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Expectations:
        return cls(plain["path"], {name: Expected(**entry) for name, entry in plain["expected"].items()}, plain["declared"])

    def apply(self, result: Result, version: str = "") -> Result:
        """The result under these expectations: a failure that was expected, a pass that was not, or as it is."""
        entry = self.expected.get(result.check)
        if entry is None or result.outcome not in ("pass", "fail", "error"):
            return result
        if expired(entry, version):
            message = f"{result.message or 'passed'} (the expected failure expired with version {entry.expires})"
            return result.with_outcome("fail" if result.outcome != "pass" else "xpass", message)
        if result.outcome == "pass":
            return result.with_outcome(
                "xpass", f"expected to fail ({entry.state}: {entry.reason}), but it passes: remove the entry"
            )
        return result.with_outcome("xfail", f"{entry.state}: {entry.reason} [{result.message}]")


def expired(entry: Expected, version: str) -> bool:
    """Whether the plugin's version has reached the entry's expiry."""
    if not entry.expires or not version:
        return False
    try:
        return Version(version) >= Version(entry.expires)
    except InvalidVersion:
        return False


def find_file(source: str | None) -> Path | None:
    """The file beside the module ``source`` or in its project: the folders above it, up to the one with a pyproject.toml."""
    if source is None:
        return None
    folder = Path(source).resolve().parent
    for _ in range(_LEVELS_UP):
        if (folder / FILE).is_file():
            return folder / FILE
        if (folder / "pyproject.toml").exists() or folder == folder.parent:
            return None
        folder = folder.parent
    return None


def read_expectations(path: Path, checks: Mapping[str, Any]) -> Expectations:
    """Read and check a file.

    Raises:
        ConfigError: naming the line, what is wrong there, and what would be right.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found_line = re.search(r"at line (\d+)", str(error))
        where = found_line.group(1) if found_line else max(len(text.splitlines()), 1)
        raise ConfigError(f"{path}:{where}: not valid TOML: {error}") from error
    for key in document:
        if key not in ("expected", "declared"):
            raise _wrong(path, _line(text, key), f"unknown key {key!r}", "tables are [[expected]] and [declared]")
    entries = document.get("expected", [])
    if not isinstance(entries, list):
        raise _wrong(path, _line(text, "expected"), "expected must be a list of tables", "write [[expected]]")
    found: dict[str, Expected] = {}
    for number, entry in enumerate(entries):
        line = _header(text, number)
        made = _entry(path, line, entry, checks)
        if made.id in found:
            raise _wrong(path, line, f"{made.id} is listed twice")
        found[made.id] = made
    return Expectations(str(path), found, _declared(path, text, document.get("declared", {})))


def _entry(path: Path, line: int, entry: Any, checks: Mapping[str, Any]) -> Expected:
    if not isinstance(entry, dict):
        raise _wrong(path, line, "an entry of expected must be a table", "write [[expected]]")
    for key, value in entry.items():
        if key not in KEYS:
            raise _wrong(path, line, f"unknown key {key!r}", f"keys are {', '.join(KEYS)}")
        if not isinstance(value, str) or (not value.strip() and key in ("id", "state", "reason")):
            raise _wrong(path, line, f"{key} must be text")
    for key in ("id", "state", "reason"):
        if key not in entry:
            raise _wrong(path, line, f"{key} is missing", "every expected failure says which check, in which state, and why")
    if entry["id"] not in checks:
        near = did_you_mean(entry["id"], checks)
        raise _wrong(path, line, f"there is no check {entry['id']!r}" + (f"; did you mean {near!r}?" if near else ""))
    if entry["state"] not in STATES:
        raise _wrong(path, line, f"state is {entry['state']!r}", f"states are {', '.join(STATES)}")
    if entry.get("expires"):
        try:
            Version(entry["expires"])
        except InvalidVersion:
            raise _wrong(path, line, f"expires is {entry['expires']!r}, not a version") from None
    return Expected(**entry)


def _declared(path: Path, text: str, table: Any) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise _wrong(path, _line(text, "declared"), "declared must be a table")
    for key, value in table.items():
        if key not in DECLARED:
            raise _wrong(path, _line(text, key), f"unknown declaration {key!r}", f"known: {', '.join(DECLARED)}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
            raise _wrong(path, _line(text, key), f"{key} must be a number that is not negative")
    return dict(table)


def _wrong(path: Path, line: int, reason: str, hint: str | None = None) -> ConfigError:
    return ConfigError(f"{path}:{line}: {reason}", hint=hint)


def _header(text: str, number: int) -> int:
    lines = [at for at, line in enumerate(text.splitlines(), 1) if re.match(r"\s*\[\[\s*expected\s*\]\]", line)]
    return lines[number] if number < len(lines) else 1


def _line(text: str, key: str) -> int:
    for at, line in enumerate(text.splitlines(), 1):
        if re.match(rf"\s*\[*\s*\"?{re.escape(key)}\b", line):
            return at
    return 1
