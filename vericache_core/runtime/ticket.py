"""A request as the schedulers see it; the answers are those of the live request."""

from __future__ import annotations

from collections.abc import Callable

from vericache_core.runtime.request import Request
from vericache_core.runtime.schedulable import Bytes


class Ticket:
    """See :class:`vericache_core.runtime.schedulable.Schedulable`.

    Full KV on another tier streams in layer by layer while the verify itself computes, so a ticket never asks for link
    time of its own: what it needs of the device meanwhile is ``transient``.

    Args:
        request: the live request.
        arrival: seconds on the loop's clock.
        holds: bytes at its greatest length.
        transient: device bytes of the swap ring while it verifies.
        away: whether its verify is in the background.
    """

    link_seconds = 0.0
    swapped_in = True

    def __init__(
        self,
        request: Request,
        arrival: float,
        holds: Callable[[Request], Bytes],
        transient: Callable[[Request], float],
        away: Callable[[Request], bool],
    ) -> None:
        self.request, self.number, self.arrival, self.priority = request, request.number, arrival, request.priority
        self._holds, self._transient, self._away = holds, transient, away
        self._held: tuple[object, Bytes] | None = None

    @property
    def holds(self) -> Bytes:
        # Asked for several times a step, and the answer changes only when a prefix is compressed, folded or dropped.
        draft = self.request.draft
        state = (id(self.request.full), None if draft is None else (id(draft), draft.prefix_tokens))
        if self._held is None or self._held[0] != state:
            self._held = (state, self._holds(self.request))
        return self._held[1]

    @property
    def transient(self) -> float:
        return self._transient(self.request)

    @property
    def prefill(self) -> int:
        request = self.request
        pending = len(request.tokens) - request.full.tokens
        return pending if request.full.tokens < request.prompt_tokens or pending > 1 else 0

    @property
    def away(self) -> bool:
        return self._away(self.request)

    @property
    def drafting(self) -> bool:
        return self.request.draft is not None

    @property
    def drafts(self) -> int:
        return len(self.request.drafts)

    @property
    def window(self) -> int:
        # A verify that was cut at the end of a step goes on: nothing is drafted behind it meanwhile.
        return len(self.request.drafts) if self.request.verifying else self.request.round_window()

    @property
    def most(self) -> int:
        return self.request.most_drafts
