"""The rows that the fault table must have: what may go wrong, what must not be possible, and what may be asked wrongly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        section: of the table.
        text: what happens.
        least: cases that there must be.
    """

    section: str
    text: str
    least: int = 1


FAULTS: Final = "Faults"
SECURITY: Final = "Security"
INPUT: Final = "Bad input"
ROWS: Final = {
    "refused": Row(FAULTS, "refuses", 3),
    "hang": Row(FAULTS, "hangs", 5),
    "drip": Row(FAULTS, "a byte at a time, or one a second", 5),
    "closed": Row(FAULTS, "closes before a reply or in the middle of one", 5),
    "length": Row(FAULTS, "wrong length", 10),
    "other": Row(FAULTS, "answer to another request", 5),
    "header": Row(FAULTS, "flip of every header field", 80),
    "flip": Row(FAULTS, "flip of payload bits, at random and each", 300),
    "truncated": Row(FAULTS, "truncation at each tenth", 10),
    "swapped": Row(FAULTS, "swapped entries", 21),
    "stale": Row(FAULTS, "stale index", 8),
    "writer": Row(FAULTS, "`kill -9` of the writer at 20 random points", 20),
    "full": Row(FAULTS, "disk full", 12),
    "redis": Row(FAULTS, "Redis restarted in the middle of a run", 3),
    "evicted": Row(FAULTS, "evicted between lookup and load, every subset of 7 chunks", 128),
    "verifier": Row(FAULTS, "verifier killed while it verifies", 4),
    "doubled": Row(FAULTS, "duplicate messages", 10),
    "reordered": Row(FAULTS, "reordered messages", 10),
    "nonsense": Row(FAULTS, "replies and blobs that make no sense", 10),
    "pickle": Row(SECURITY, "no pickle anywhere: a canary does not sing", 3),
    "headers": Row(SECURITY, "oversized or overlapping headers, refused before allocation", 10),
    "paths": Row(SECURITY, "path tricks", 10),
    "tenants": Row(SECURITY, "tenants are isolated by their salt: 8 threads, disjoint vocabularies", 8),
    "strangers": Row(SECURITY, "unauthenticated peers are refused", 10),
    "keys": Row(SECURITY, "keys are those of the golden file in any process, Python and hash seed", 5),
    "identity": Row(INPUT, "wrong model, revision, dtype, tokenizer or format version behind the same name", 10),
    "whole": Row(INPUT, "full hit of a prompt: exactly one token is computed", 2),
    "short": Row(INPUT, "prompt shorter than a chunk"),
    "clock": Row(INPUT, "clock skew", 5),
    "skew": Row(INPUT, "version skew between drafter and verifier", 4),
    "compressor": Row(INPUT, "compressor that the other side does not know", 2),
    "space": Row(INPUT, "store without space", 2),
    "permission": Row(INPUT, "store without permission", 2),
    "settings": Row(INPUT, "addresses, limits and files that cannot be meant", 5),
}
