"""What remote requests hold of the device budget: KV of their prefixes, which they share, and rows of their own.

A request claims its bytes before its session is opened, as at its greatest length. What is to come over the link is an
estimate until it is here, and a measurement from then on. Prefixes that nothing uses live in what is left.
"""

from __future__ import annotations

from vericache_core.cache.pages import PAGE
from vericache_core.errors import ConfigError, RemoteRefused
from vericache_core.remote.prefixes import Local, Prefixes
from vericache_core.runtime.planning import Planner
from vericache_core.runtime.request import Request
from vericache_core.runtime.schedulable import Scheduler
from vericache_core.sizes import exact_size


class DeviceRoom:
    """Counts bytes; who waits and who is opened is decided elsewhere.

    Args:
        scheduler: has the budget, and runs requests here that take of it, too.
        planner: knows how small prefixes become.
        token_bytes: of full KV, all layers.
        most_kept: bytes of prefixes that nothing uses.
    """

    def __init__(self, scheduler: Scheduler, planner: Planner, token_bytes: int, most_kept: int) -> None:
        self.prefixes = Prefixes()
        self._scheduler, self._planner = scheduler, planner
        self._token_bytes, self._most_kept = token_bytes, most_kept
        self._own: dict[int, float] = {}

    def claim(self, request: Request, prefix: Local, mode: str) -> None:
        """Count ``request`` from now on, whether it fits already or not; ``prefix`` counts it as a user.

        Raises:
            ConfigError: it would not fit if it were alone; nothing is claimed then.
        """
        compressor, tokens = request.metrics.compressor, len(prefix.ids)
        coming: dict[str, float] = {}
        if drafts(mode):
            assert compressor is not None
            coming["prefix"] = (self._planner.share(compressor, tokens) * tokens + PAGE) * self._token_bytes
        if mode.startswith(("fetch", "stream")):
            coming["rows"] = float((tokens + PAGE) * self._token_bytes)
        # Its rows begin in a copy of the page that the prefix ends in, and end in a page of their own.
        own = 0.0 if mode == "remote" else float((request.greatest_length - tokens + 2 * PAGE) * self._token_bytes)
        alone = own + sum({**coming, **prefix.sizes}.values())
        if alone > self._scheduler.budget.device:
            raise ConfigError(
                "the device budget is too small for this request",
                cause=f"it needs {exact_size(alone)} of {exact_size(self._scheduler.budget.device)} to draft for a store",
                hint="raise device_budget, keep less, shorten the request, or let the store generate (remote_mode=remote)",
            )
        prefix.expected.update(coming)
        self._own[request.number] = own

    def measure(self, request: Request, prefix: Local) -> None:
        """Count the compressed KV that ``request`` now drafts on instead of the estimate.

        Raises:
            RemoteRefused: it is more than was to be expected, and more than there is room for.
        """
        assert prefix.draft is not None
        assert request.draft is not None
        if request.metrics.compressor is not None:
            share = prefix.draft.device_bytes / (self._token_bytes * len(prefix.ids))
            self._planner.saw(request.metrics.compressor, share)
        rows = request.greatest_length - len(prefix.ids) + PAGE
        self._own[request.number] = float(request.draft.device_bytes + rows * self._token_bytes)
        if not self.fits:
            budget = exact_size(self._scheduler.budget.device)
            raise RemoteRefused(
                "the device budget has no room for the compressed prefix that came",
                cause=f"it takes {exact_size(prefix.nbytes)}, and all that are under way have {budget}",
                hint="raise device_budget, or keep less",
            )

    def release(self, request: Request, prefix: Local) -> None:
        """Undo a :meth:`claim`, and the count of a user."""
        self._own.pop(request.number, None)
        self.prefixes.leave(prefix)
        self.trim()

    @property
    def held(self) -> float:
        """Bytes that were claimed."""
        return self.prefixes.claimed + sum(self._own.values())

    @property
    def fits(self) -> bool:
        """Whether all that was claimed fits beside what runs here."""
        return self.held <= self._left

    def trim(self) -> None:
        """Let prefixes go that nothing uses and that there is no room for."""
        self.prefixes.trim(min(self._most_kept, self._left - self.held))

    @property
    def _left(self) -> float:
        """Bytes of the budget that requests which run here do not take."""
        return self._scheduler.budget.device - sum(ticket.holds.device for ticket in self._scheduler.running)


def drafts(mode: str) -> bool:
    """Whether requests in this mode draft on compressed KV."""
    return not mode.startswith(("remote", "fetch"))
