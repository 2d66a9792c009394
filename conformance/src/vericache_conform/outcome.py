"""What a check says, and what the suite makes of it: one of six outcomes, never a silent pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

Outcome = Literal["pass", "fail", "error", "skip", "xfail", "xpass"]
OUTCOMES: Final[tuple[Outcome, ...]] = ("pass", "fail", "error", "skip", "xfail", "xpass")
BAD: Final = frozenset({"fail", "error", "xpass"})
"""Outcomes that make a run fail. An unexpected pass is one: the list of expected failures must stay true."""

Example = Mapping[str, Any]
"""One concrete input of a check, in JSON types: enough to run exactly that again."""


class Failure(AssertionError):
    """A promise of the contract is broken.

    Args:
        message: what was promised and what came instead, in one line.
        example: the input that showed it.
        facts: numbers that help to see why.
    """

    def __init__(self, message: str, *, example: Example | None = None, facts: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message, self.example, self.facts = message, example, dict(facts or {})


class Skip(Exception):
    """The check does not apply.

    Args:
        reason: why.
        declared: the compressor's own descriptor says so (its kind, a capability that is ``no``); only such a
            skip is allowed at the level ``certified``.
    """

    def __init__(self, reason: str, *, declared: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.declared = reason, declared


class Unable(Exception):
    """The check cannot be carried out, and that is not the compressor's fault: an error, not a failure."""


@dataclass(frozen=True)
class Evidence:
    """What a check that passed has to show: a pass without it is an error.

    Attributes:
        tried: concrete inputs that were tried.
        facts: what was measured, in JSON types.
    """

    tried: int
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """Outcome of one check on one compressor.

    Attributes:
        check, subject: id of the check, name of the compressor.
        outcome: one of :data:`OUTCOMES`.
        message: why, for everything but a pass.
        tried: inputs tried.
        seconds: wall time.
        example: the failing input; ``vericache-conform replay`` runs it again.
        facts: measured numbers, a mismatch report.
        output: what the compressor wrote to stdout and stderr meanwhile.
        declared: for a skip, that the compressor's descriptor asks for it.
        reproduce: command that runs this check again.
    """

    check: str
    subject: str
    outcome: Outcome
    message: str = ""
    tried: int = 0
    seconds: float = 0.0
    example: Example | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    output: str = ""
    declared: bool = False
    reproduce: str = ""

    @property
    def bad(self) -> bool:
        return self.outcome in BAD

    def to_json(self) -> dict[str, Any]:
        """JSON types, every field."""
        return asdict(self)

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Result:
        """Inverse of :meth:`to_json`; keys of later versions are ignored."""
        return cls(**{name: plain[name] for name in cls.__dataclass_fields__ if name in plain})

    def with_outcome(self, outcome: Outcome, message: str) -> Result:
        return replace(self, outcome=outcome, message=message)
