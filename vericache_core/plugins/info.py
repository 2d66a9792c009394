"""One line of a listing of plugins."""

from __future__ import annotations

from dataclasses import dataclass

from vericache_core.plugins.discovery import Candidate
from vericache_core.plugins.passport import standing_of


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """One line of ``vericache plugins list``.

    ``status`` is ``ok`` (built in, registered in process, or loaded), ``ok?`` (installed, not loaded yet),
    ``failed`` (the last load failed), ``disabled``, ``conflict`` or ``invalid`` (not a legal name).
    ``conformance`` is what its conformance passport says: ``conformant ...``, ``stale``, ``failed`` or ``unverified``.
    """

    name: str
    distribution: str
    version: str
    status: str
    target: str
    summary: str = ""
    reason: str = ""
    conformance: str = "unverified"

    @classmethod
    def of(cls, candidate: Candidate, status: str, reason: str) -> PluginInfo:
        """Describe a candidate that has this status for this reason."""
        return cls(
            candidate.name,
            candidate.distribution,
            candidate.version,
            status,
            candidate.entry_point.value,
            candidate.summary,
            reason,
            str(standing_of(candidate.name, candidate.entry_point.module, candidate.version)),
        )
