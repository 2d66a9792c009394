"""Every mutant: its fault, and the checks that must catch it; no others may."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from vericache_core.errors import UsageError
from vericache_core.plugins.fields import did_you_mean

HERE: Final = "vericache_conform.mutants"


@dataclass(frozen=True)
class Mutant:
    """A compressor with one fault. Nothing is imported until it is run.

    Attributes:
        name: in reports and on the command line, after ``mutant:``.
        target: ``module:NAME`` of its descriptor.
        fault: what is wrong with it, in one line.
        caught_by: ids of exactly the checks that catch it; empty for a healthy one.
        options: fixed options.
        expected: a file in ``data`` that is its conformance.toml.
        contained: it hangs, crashes or eats memory, so every check that compresses catches it.
    """

    name: str
    target: str
    fault: str
    caught_by: frozenset[str]
    options: Mapping[str, Any] = field(default_factory=dict)
    expected: str | None = None
    contained: bool = False

    @property
    def expected_file(self) -> Path | None:
        return None if self.expected is None else Path(__file__).with_name("data") / self.expected


ATTENDING: Final = ("C-05", "C-09", "C-14", "C-18", "C-19", "C-22", "C-23", "C-24")
IDENTITY: Final = ("R-01", "R-04", "R-05", "R-06", "R-07", "R-08", "R-09", "R-10", "R-11", "R-12", "R-13", "R-15")


def _mutant(where: str, name: str, fault: str, *caught_by: str, **more: Any) -> Mutant:
    return Mutant(name, f"{HERE}.{where}:{name.upper().replace('-', '_')}", fault, frozenset(caught_by), **more)


_ALL: Final = (
    Mutant("healthy-drop", f"{HERE}.healthy:DROP", "none: the token dropper the others are made of", frozenset()),
    Mutant("healthy-quant", f"{HERE}.healthy:QUANT", "none: the quantizer the others are made of", frozenset()),
    _mutant("package", "other-name", "calls itself something else than its descriptor", "S-01", "C-09"),
    _mutant("package", "future-api", "declares an API version that does not exist yet", "S-02"),
    _mutant("slow_import", "slow-import", "takes seconds to import", "S-03"),
    _mutant("package", "undescribed-option", "an option without help or range", "S-04"),
    _mutant("patches_import", "patches-on-import", "patches transformers when it is imported", "S-05"),
    _mutant("package", "writes-file", "writes a file outside a temporary folder", "S-06"),
    _mutant("package", "prints", "prints to stdout", "S-07"),
    Mutant(
        "stale-list",
        f"{HERE}.healthy:DROP",
        "lists an expected failure that names no check",
        frozenset({"S-08"}),
        expected="stale.toml",
    ),
    _mutant("maps", "unsorted-map", "positions from the last to the first", "C-01", "C-09"),
    _mutant("maps", "map-off-by-one", "every position is one too low", "C-02", "C-18"),
    _mutant("maps", "scaled-rows", "kept values are not quite the source values", "C-02", "C-18"),
    _mutant("maps", "drops-window", "does not protect the newest tokens", "C-03"),
    _mutant("maps", "ignores-protected", "does not protect the spans of the context", "C-03"),
    _mutant("maps", "window-by-score", "protects the window by a score that real ones can exceed", "C-03"),
    _mutant("maps", "float-budget", "computes the budget in floating point", "C-04"),
    _mutant("maps", "keeps-zero", "a small budget keeps nothing at all", "C-04"),
    _mutant("inputs", "needs-long-prompt", "asserts that a prompt is longer than its window", "C-05"),
    _mutant("inputs", "mutates-input", "writes to the values it was given", "C-06"),
    _mutant("inputs", "aliases-full-cache", "keeps the full cache alive", "C-06", "C-11"),
    _mutant("inputs", "changes-held", "extend changes what it was given", "C-06", "C-10", "C-15", "C-20"),
    _mutant("state", "hash-order", "iterates over a set of strings", "C-07"),
    _mutant("state", "process-number", "depends on the process", "C-07"),
    _mutant("state", "longest-so-far", "keeps a largest value on the class", "C-07"),
    _mutant("state", "sees-batch-mates", "normalises with other requests", "C-08"),
    _mutant("state", "forgets-option", "the payload lacks an option", "C-09"),
    _mutant("state", "by-arrival", "boundaries depend on how tokens arrive", "C-10", "C-15"),
    _mutant("numbers", "forgets-scales", "leaves scales out of the bytes", "C-09", "C-11"),
    _mutant("numbers", "keeps-large-storage", "stores views of a larger tensor", "C-11"),
    _mutant("numbers", "exact-by-accident", "says it quantizes and does not", "C-12"),
    _mutant("numbers", "wrong-rope", "keys come back rotated by a wrong position", "C-12", expected="bound.toml"),
    _mutant("state", "remembers-calls", "every call on an instance differs", "C-13", "C-16"),
    _mutant("state", "dirty-after-abort", "an exception leaves a flag set", "C-13"),
    _mutant("numbers", "nan-on-constant", "0/0 on rows without a range", "C-14"),
    _mutant("state", "rollback-off-by-one", "one row is wrong after a rollback across the border", "C-15", "C-20"),
    _mutant("state", "rollback-does-nothing", "rollback returns what it was given", "C-15", "C-20"),
    _mutant("state", "tail-on-instance", "extend uses a fact of the instance's last compress", "C-15", "C-16", "C-20"),
    _mutant("maps", "shrinks-length", "reports the stored length as the logical one", "C-09", "C-15", "C-17", "C-20"),
    _mutant("numbers", "mask-shortcut", "attends to the newest rows only", "C-18"),
    _mutant("numbers", "rotates-queries", "rotates queries for a wrong position", "C-18"),
    _mutant("state", "re-encodes", "decodes and encodes again at every append", "C-10", "C-15", "C-19", "C-20"),
    _mutant("state", "residue-of-question", "a question leaves something behind", "C-15", "C-20"),
    _mutant("inputs", "assumes-contiguous", "reads memory in order, whatever the strides", "C-21"),
    _mutant("inputs", "mixes-heads", "takes query heads for KV heads", "C-22"),
    _mutant("inputs", "powers-of-two", "fails in the middle where it should refuse", "C-23"),
    _mutant("inputs", "prunes-sliding", "compresses sliding-window layers", "C-24"),
    _mutant("inputs", "seeds-globally", "seeds the global generator", "C-25"),
    _mutant("inputs", "reads-global-seed", "depends on the global seed", "C-07", "C-25"),
    _mutant("state", "thread-count", "depends on the number of threads", "C-07", "C-26"),
    _mutant("inputs", "wrong-dtype", "stores float32 whatever the cache is", "C-27"),
    _mutant("running", "hooks-model", "hooks every linear layer while its request lives", *IDENTITY, "R-03", "R-14", "M-01"),
    _mutant("numbers", "raises-in-attend", "attending to its rows raises", *ATTENDING, *IDENTITY, "R-02", "R-03", "R-14"),
    _mutant("running", "raises-in-extend", "extend raises on models of three layers", "R-15"),
    _mutant("running", "decoy", "attends to rows that it does not list", "C-11", "R-13"),
    _mutant("maps", "keeps-everything", "keeps every token under the name of a dropper", "C-04", "R-08"),
    _mutant("running", "disappoints", "stays below the acceptance that it declares", "P-01", expected="floor.toml"),
    _mutant("package", "hangs", "never comes back", "C-05", contained=True),
    _mutant("package", "crashes", "kills the interpreter", "C-05", contained=True),
    _mutant("package", "eats-memory", "asks for a terabyte", "C-05", contained=True),
    _mutant("package", "exits", "calls sys.exit", "C-05", contained=True),
    _mutant("inputs", "raises", "raises ZeroDivisionError", "C-05", contained=True),
)
MUTANTS: Final[dict[str, Mutant]] = {mutant.name: mutant for mutant in _ALL}


def find_mutant(name: str) -> Mutant:
    """The mutant of this name.

    Raises:
        UsageError: there is none.
    """
    if name in MUTANTS:
        return MUTANTS[name]
    near = did_you_mean(name, MUTANTS)
    raise UsageError(
        f"there is no mutant {name!r}" + (f"; did you mean {near!r}?" if near else ""), hint="vericache-conform mutants"
    )
