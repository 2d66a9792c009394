"""How one request paces itself: its window controller, fed with prices of the company it is in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vericache_core.runtime.window import WindowController

Prices = Callable[[], Sequence[float]]


class Pace:
    """Asked before a round for its window, told afterwards what came of it.

    Args:
        controller: of this request.
        prices: seconds of rounds by window, now.
    """

    def __init__(self, controller: WindowController, prices: Prices) -> None:
        self.controller = controller
        self._prices = prices

    def next_window(self) -> int:
        """Tokens to draft in the round that begins; 0 for one plain token."""
        return self.controller.choose(self._prices())

    def round_ended(self, drafted: int, accepted: int, committed: int) -> None:
        """Take in what the full KV said of a round, which committed so many tokens."""
        self.controller.observe(drafted, accepted, self._prices(), committed)

    def close(self) -> None:
        """The request has ended."""
        self.controller.close()
