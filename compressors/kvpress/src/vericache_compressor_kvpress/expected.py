"""Checks of the conformance suite that a name fails, and why that stays; docs/results-kvpress.md has the results."""

from __future__ import annotations

from typing import Final

SHORT: Final = "a prompt that the press finds too short survives whole"
WINDOW: Final = "the newest tokens survive whatever the budget; beyond them the press drops what it finds below the threshold"
MIXED: Final = "refuses, by name, models of which it knows only some layers, such as Gemma 3"
GLOBAL: Final = "one budget over all heads: a head that would go empty keeps its newest token beside it"

EXPECTED: Final[dict[str, dict[str, str]]] = {
    "snapkv": {"C-04": SHORT},
    "compactor": {"C-04": SHORT},
    "ada-kv": {"C-04": SHORT},
    "critical-ada-kv": {"C-04": SHORT},
    "entropy-gated-chunk-kv": {"C-04": SHORT},
    "chunk-kv": {"C-04": f"{SHORT}, and whole chunks meet no count exactly"},
    "pyramid-kv": {"C-04": f"{SHORT}, and budgets by layer are rounded one by one"},
    "finch": {"C-04": SHORT},
    "sim-layer-kv": {"C-04": "the press takes no budget"},
    "dms": {"C-04": WINDOW},
    "kvzip": {"C-04": GLOBAL, "R-03": MIXED, "R-09": MIXED},
    "kvgrad": {"C-04": GLOBAL, "R-03": MIXED, "R-09": MIXED},
    "kvcompose": {"C-04": "budgets by layer, of which none is empty", "R-03": MIXED, "R-09": MIXED},
}
"""Name after ``kvpress-`` to check to reason."""
