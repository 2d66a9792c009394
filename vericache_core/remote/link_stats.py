"""Figures of the link, as the drafting side sees them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class LinkStats:
    """What the link did since the engine started.

    Attributes:
        transfers: by kind, ``prefix`` and ``rows``: bytes and seconds of the newest one.
        verdict_seconds: from a question to its verdict, each time.
        first_draft_seconds: from the opening of a session to its first draft.
    """

    transfers: dict[str, tuple[int, float]] = field(default_factory=dict)
    sessions: int = 0
    failures: int = 0
    dropped_verdicts: int = 0
    received_bytes: int = 0
    verdict_seconds: list[float] = field(default_factory=list)
    first_draft_seconds: list[float] = field(default_factory=list)
