"""A check: a plain function with an id, what it needs, why it exists and how to mend what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, get_args

from vericache_conform.outcome import Evidence

if TYPE_CHECKING:
    from vericache_conform.case import Case

Tier = Literal["static", "contract", "runtime", "model", "perf"]
TIERS: Final[tuple[Tier, ...]] = get_args(Tier)
TIMEOUTS: Final[dict[Tier, float]] = {"static": 60.0, "contract": 60.0, "runtime": 180.0, "model": 900.0, "perf": 300.0}
"""Seconds after which a check is taken to hang, unless it says otherwise. Generous: loaded machines are slow."""

EVERY_KIND: Final = frozenset({"token-drop", "quantization", "hybrid"})
ANY: Final = "any"
CheckFunction = Callable[["Case"], Evidence]


@dataclass(frozen=True)
class Check:
    """See the module docstring.

    Attributes:
        id: stable for ever; reports, ``conformance.toml`` and all doors use it.
        title: one line, the promise that is tested.
        tier: which budget it belongs to.
        function: ``Case -> Evidence``, or raises ``Failure`` or ``Skip``.
        capability: the capability of the descriptor that it needs, or ``"any"``.
        kinds: kinds of compressor that it applies to.
        rationale: what goes wrong for a user without it.
        origin: the fault, elsewhere or here, that it comes from.
        fix: how to mend what it finds.
        cost: recorded seconds on one core, for ``--budget``.
        timeout: seconds after which it is taken to hang.
    """

    id: str
    title: str
    tier: Tier
    function: CheckFunction
    capability: str
    kinds: frozenset[str]
    rationale: str
    origin: str
    fix: str
    cost: float
    timeout: float


_CHECKS: dict[str, Check] = {}


def check(
    id: str,
    *,
    tier: Tier,
    rationale: str,
    origin: str,
    fix: str,
    capability: str = ANY,
    kinds: Iterable[str] = EVERY_KIND,
    cost: float = 1.0,
    timeout: float | None = None,
) -> Callable[[CheckFunction], CheckFunction]:
    """Register the decorated function as a check; its docstring's first line is the title."""

    def register(function: CheckFunction) -> CheckFunction:
        if id in _CHECKS:
            raise ValueError(f"check {id} is defined twice")
        title = (function.__doc__ or "").strip().splitlines()[0]
        limit = TIMEOUTS[tier] if timeout is None else timeout
        _CHECKS[id] = Check(id, title, tier, function, capability, frozenset(kinds), rationale, origin, fix, cost, limit)
        return function

    return register


def registered() -> dict[str, Check]:
    """Every check defined so far, by id."""
    return dict(_CHECKS)
