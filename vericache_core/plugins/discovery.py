"""What is installed, from package metadata alone: nothing of a plugin is imported here."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint
from typing import Any, Final

from vericache_core._version import __version__
from vericache_core.plugins.spec import is_valid_name

GROUP: Final = "vericache.compressors"
CORE_DISTRIBUTION: Final = "vericache"
BUILTIN_MODULE: Final = "vericache_core.builtin"

# Kept here and not read from the module, because importing it imports torch and listing must not.
BUILTINS: Final[Mapping[str, str]] = {
    "identity": "keeps everything; every draft is accepted",
    "random": "keeps random positions; the floor for token droppers",
    "adversarial": "returns noise; drafts are rejected, output stays right",
}

log = logging.getLogger("vericache.plugins")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One entry point that claims a compressor name."""

    name: str
    distribution: str
    version: str
    entry_point: EntryPoint
    summary: str = ""

    @property
    def builtin(self) -> bool:
        """Whether this is one of the compressors inside the core."""
        return self.entry_point.module == BUILTIN_MODULE

    @property
    def title(self) -> str:
        """The distribution and its version, as people are told them."""
        return f"{self.distribution} {self.version}"


def canonical(distribution: str) -> str:
    """Return a distribution name in the one spelling that compares equal (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def builtin_candidates() -> Iterator[Candidate]:
    """Yield the compressors inside the core; they load like any plugin."""
    for name, summary in BUILTINS.items():
        entry_point = EntryPoint(name, BUILTIN_MODULE, GROUP)
        yield Candidate(name, CORE_DISTRIBUTION, __version__, entry_point, summary)


def installed_candidates() -> list[Candidate]:
    """Read the entry points of every installed distribution, in the order of ``sys.path``.

    Distributions are read one by one rather than through ``importlib.metadata.entry_points()``, which
    raises for all of them when the metadata of one is damaged.
    """
    importlib.invalidate_caches()
    found: list[Candidate] = []
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        try:
            candidates = list(_candidates_of(distribution))
        except Exception as error:  # noqa: BLE001  # damaged metadata of one package must not hide the others
            log.warning("skipped a distribution with unreadable metadata: %r", error)
            continue
        # The same distribution twice on sys.path: the first one is what an import finds.
        key = canonical(candidates[0].distribution) if candidates else ""
        if candidates and key not in seen:
            seen.add(key)
            found.extend(candidates)
    return found


def _candidates_of(distribution: Distribution) -> Iterator[Candidate]:
    # A plain substring test first: parsing the metadata of a hundred packages costs a tenth of a second.
    if GROUP not in (distribution.read_text("entry_points.txt") or ""):
        return
    metadata: Any = distribution.metadata  # an email message, which typeshed describes differently by version
    name, version, summary = (metadata.get(key) for key in ("Name", "Version", "Summary"))
    targets: set[tuple[str, str]] = set()
    for entry_point in distribution.entry_points:
        if entry_point.group == GROUP and (entry_point.name, entry_point.value) not in targets:
            targets.add((entry_point.name, entry_point.value))
            yield Candidate(entry_point.name, name or "unknown", version or "unknown", entry_point, summary or "")


def group_by_name(candidates: Iterable[Candidate]) -> dict[str, list[Candidate]]:
    """Gather candidates that claim the same name; more than one is a conflict."""
    groups: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        groups.setdefault(candidate.name, []).append(candidate)
    return groups


def status_of(claims: list[Candidate]) -> str:
    """Return what a listing says about a name that is not disabled, without importing anything.

    ``ok?`` carries a question mark because only loading shows whether a plugin works.
    """
    if len(claims) > 1:
        return "conflict"
    if not is_valid_name(claims[0].name):
        return "invalid"
    return "ok" if claims[0].builtin else "ok?"
