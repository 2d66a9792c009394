"""Mode and window of a remote request: as configured, or the fastest by measured costs."""

from __future__ import annotations

from vericache_core.engine import Engine
from vericache_core.remote.link import Link
from vericache_core.remote.measure import LinkSpeed, measure_link
from vericache_core.remote.paths import Task, best_window, choose_path
from vericache_core.remote.prefixes import Local
from vericache_core.runtime.request import Request


class PathChooser:
    """Learns from verdicts how often drafts are wrong.

    Args:
        engine: whose configuration and measured costs count.
        link: to the store; measured once, when that is first of use.
    """

    def __init__(self, engine: Engine, link: Link) -> None:
        self._engine, self._config, self._link = engine, engine.config, link
        self._measured: LinkSpeed | None = None
        self._wrong = self._judged = 0

    def learn(self, drafted: int, accepted: int) -> None:
        """A verdict decided on ``drafted`` tokens. A rejection judges one draft wrong; those behind it were never looked at."""
        self._wrong += drafted > accepted
        self._judged += accepted + (drafted > accepted)

    def choose(self, request: Request, prefix: Local, company: int) -> tuple[str, int]:
        """Mode and window of a request that comes with ``company`` requests, itself included.

        Raises:
            RemoteError: the link could not be measured.
        """
        mode, window = self._config.remote_mode, self._config.window
        if mode != "auto" and isinstance(window, int):
            return mode, window
        task, costs = self._task(request, prefix, company), self._engine.planner.pricer.costs
        if mode == "auto":
            mode = choose_path(costs, task)
        if window == "auto":
            window = best_window(costs, task, stateless=mode.endswith("stateless"))
        return mode, window

    def _task(self, request: Request, prefix: Local, company: int) -> Task:
        """What is known of a request and those that came with it."""
        name, tokens = request.metrics.compressor or "", len(prefix.ids)
        full = float(sum(layer.token_bytes for layer in self._engine.adapter.layers) * tokens)
        if prefix.draft is not None:
            kept = prefix.draft.device_bytes / full
        else:
            keep = self._config.options_of(name).get("keep", 0.3)
            kept = float(keep) if isinstance(keep, int | float) else 0.3
        if self._measured is None:
            self._measured = measure_link(self._link)
        return Task(
            requests=company,
            prefix=tokens,
            new_tokens=max(1, request.params.max_new_tokens),
            full_bytes=full,
            kept=min(1.0, kept),
            hazard=min(0.95, max(0.005, (self._wrong + 1.0) / (self._judged + 20.0))),
            latency=self._measured.latency,
            bandwidth=self._measured.bandwidth,
            reload=1.0 / max(self._engine.planner.pricer.costs.links["host"].seconds_per_byte, 1e-15),
            here=prefix.draft is not None,
        )
