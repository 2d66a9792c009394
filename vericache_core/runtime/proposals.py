"""One request's proposals: asked of its proposer, handed to the next stage, and told how they did there.

Whatever a proposer raises costs speed, never tokens: it is let go, and the request goes on without.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from vericache_core.errors import describe
from vericache_core.runtime.metrics import RequestMetrics
from vericache_core.runtime.propose import Proposer
from vericache_core.runtime.speculation import SpeculationPace

T = TypeVar("T")
log = logging.getLogger("vericache.runtime")


class Proposals:
    """See the module's docstring. Without a proposer there are none.

    Args:
        number: of the request.
        metrics: of the request.

    Attributes:
        proposer: proposes tokens to the drafter, or to the full KV while nothing is drafted.
        speculation: says how many of them the full KV is asked about, when given; else the proposer does.
        asked: proposals that the step or the verify under way checks.
    """

    def __init__(self, number: int, metrics: RequestMetrics) -> None:
        self._number, self._metrics = number, metrics
        self.proposer: Proposer | None = None
        self.speculation: SpeculationPace | None = None
        self.asked: list[int] = []

    def follow(self, tokens: Sequence[int], count: int) -> None:
        """The full KV has taken in ``count`` of ``tokens`` so far."""
        self._guarded(lambda proposer: proposer.follow(tokens, count))

    def to_drafter(self, tokens: Sequence[int], drafts: Sequence[int], most: int) -> Sequence[int]:
        """Up to ``most`` proposals behind ``tokens`` and ``drafts``, which the drafter checks in its next step."""
        found = None if most <= 0 else self._guarded(lambda proposer: proposer.propose(tokens, drafts, most))
        self.asked = found or []
        return self.asked

    def to_full_kv(self, tokens: Sequence[int], most: int) -> list[int]:
        """Up to ``most`` proposals behind ``tokens``, which the full KV verifies: speculation on full KV."""
        speculation = self.speculation
        if speculation is None:
            return list(self.to_drafter(tokens, (), most))
        self.asked = self._guarded(lambda _: speculation.propose(tokens, most)) or []
        return list(self.asked)

    def checked(self, proposed: int, agreed: int) -> None:
        """The next stage agreed with the first ``agreed`` of ``proposed`` that it was asked about."""
        if proposed and self.proposer is not None:
            self.proposer.told(proposed, agreed)
            self._metrics.proposed += proposed
            self._metrics.proposals_kept += agreed
        self.forget()

    def forget(self) -> None:
        """What the next stage was asked about is not checked any more, or has been."""
        self.asked = []

    def round_ended(self, tokens: Sequence[int]) -> None:
        """A round has ended, however it was drafted; ``tokens`` are all that are committed."""
        speculation = self.speculation
        if speculation is not None:
            self._guarded(lambda _: speculation.round_ended(tokens))

    @property
    def device_bytes(self) -> int:
        """Device KV bytes that the proposer holds between steps."""
        return 0 if self.proposer is None else self.proposer.device_bytes

    def holds(self, tokens: int) -> float:
        """Device KV bytes that the proposer holds at most for a sequence of ``tokens`` tokens."""
        return 0.0 if self.proposer is None else self.proposer.holds(tokens)

    def seconds(self, drafts: int) -> float:
        """What proposing in a round of ``drafts`` drafts takes, as far as it was measured."""
        return 0.0 if self.proposer is None else self.proposer.seconds(drafts)

    def close(self) -> None:
        """Give back what the proposer holds; it may be asked again, and begins anew."""
        if self.proposer is not None:
            self.proposer.close()

    def _guarded(self, ask: Callable[[Proposer], T]) -> T | None:
        """What the proposer answers; None without one, and from when on it has failed."""
        if self.proposer is None:
            return None
        try:
            return ask(self.proposer)
        except Exception as error:  # noqa: BLE001 (whatever a proposer raises costs speed, never tokens)
            cause = describe(error)
        self.proposer.close()
        self.proposer = self.speculation = None
        log.warning("request %d: the proposer failed (%s); going on without", self._number, cause)
        self._metrics.degraded.append(f"proposer failed: {cause}")
        return None
