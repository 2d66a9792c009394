"""How one request paces itself: its window controller, fed with prices of the company it is in."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vericache_core.runtime.hazard import PriorBook
from vericache_core.runtime.window import WindowController

Prices = Callable[[], Sequence[float]]


class Pace:
    """Asked before a round for its window, told afterwards what came of it.

    Args:
        controller: of this request.
        prices: seconds of rounds by window, now.
        book: experience shared by requests, and the key of this one's compressor in it.
    """

    def __init__(self, controller: WindowController, prices: Prices, book: PriorBook, key: str) -> None:
        self.controller = controller
        self._prices, self._book, self._key = prices, book, key

    def next_window(self) -> int:
        """Tokens to draft in the round that begins; 0 for one plain token."""
        return self.controller.choose(self._prices())

    def round_ended(self, drafted: int, accepted: int) -> None:
        """Take in what the full KV said of a round."""
        self.controller.observe(drafted, accepted, self._prices())
        self._book.observe(self._key, drafted, accepted)
