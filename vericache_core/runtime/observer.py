"""Where metrics look in on the step loop; without any the loop pays for calls of empty methods."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vericache_core.runtime.loop import StepLoop
    from vericache_core.runtime.timeline import Span


class LoopObserver:
    """What a step loop tells, on its own thread; the base listens to nothing.

    A method must return soon and raise nothing: the loop waits for it.
    """

    def stepped(self, loop: StepLoop) -> None:
        """A step has ended; the requests that finished in it are still among ``loop.requests``."""

    def happened(self, span: Span) -> None:
        """Something has ended, of a step or beside it: rows of a request, or a layer of its swap."""

    def removed(self, loop: StepLoop) -> None:
        """A request has left, finished or not, and its memory is given back."""
