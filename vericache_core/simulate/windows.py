"""The window controller against every static window, on the same requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from vericache_core.runtime.rounds import MOST
from vericache_core.simulate.compare import Setup, simulate


@dataclass(frozen=True)
class Search:
    """Tokens a second, means over the seeds.

    Attributes:
        static: by window.
        adaptive: with the controller's choice.
    """

    static: dict[int, float]
    adaptive: float

    @property
    def best(self) -> int:
        """The best static window; of equals the shortest."""
        return max(self.static, key=lambda window: self.static[window])

    @property
    def ratio(self) -> float:
        """Adaptive over the best static window."""
        return self.adaptive / self.static[self.best]


def search_windows(
    setup: Setup,
    windows: Sequence[int] = range(MOST + 1),
    seeds: Sequence[int] = (0,),
    progress: Callable[[str], None] | None = None,
) -> Search:
    """Simulate ``setup`` with each static window of ``windows`` and with the controller's; 0 drafts nothing.

    Raises:
        ConfigError: as :func:`vericache_core.simulate.compare.simulate` does.
    """

    def rate(window: int | None) -> float:
        if progress is not None:
            progress("adaptive" if window is None else f"window {window}")
        found = [simulate(replace(setup, window=window, seed=seed)).tokens_per_s for seed in seeds]
        return sum(found) / len(found)

    return Search({window: rate(window) for window in windows}, rate(None))
