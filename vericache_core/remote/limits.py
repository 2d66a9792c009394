"""What one store takes on, and how long it waits for a client that has gone silent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Bounds of a store; a request beyond one is refused by name.

    Attributes:
        sessions, tenant_sessions: open sessions, together and of one tenant.
        tokens: longest prompt with its answer.
        drafts: longest block of drafts.
        prefix_bytes: full and compressed KV of prefixes that no session uses; the least recently used go first.
        session_bytes: KV of sessions on top of their prefixes.
        idle: seconds after which a silent session is closed.
        calls: calls at a time; more are turned away at once.
    """

    sessions: int = 256
    tenant_sessions: int = 128
    tokens: int = 1 << 20
    drafts: int = 64
    prefix_bytes: int = 8 << 30
    session_bytes: int = 8 << 30
    idle: float = 60.0
    calls: int = 512
