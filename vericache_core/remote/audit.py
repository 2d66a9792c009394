"""Audits on the store's side: an answer that was drafted is decoded once more by a twin of its request, beside the sessions.

The twin computes everything itself and shares no rows with the session. One is under way at a time, so that audits take
no more of the store than one plain request does.
"""

from __future__ import annotations

from vericache_core.engine import Engine
from vericache_core.runtime.request import Request


class TwinAudit:
    """On the engine's thread.

    Args:
        engine: whose ``audit`` says which answers, and judges; without one nothing happens.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._under_way: tuple[Request, Request] | None = None

    def begin(self, request: Request) -> None:
        """``request`` has finished: start its twin, if it is its turn and no other audit is under way."""
        audit = self._engine.audit
        if audit is None or self._under_way is not None or request.error is not None:
            return
        if not audit.turn(request.metrics.compressor, request.generated):
            return
        twin = audit.twin(request.tokens[: request.prompt_tokens], request.params)
        if twin is not None:
            self._under_way = request, twin

    def settle(self) -> None:
        """Judge the answer whose twin has finished."""
        if self._under_way is None or not self._under_way[1].finished:
            return
        (request, twin), self._under_way = self._under_way, None
        assert self._engine.audit is not None
        self._engine.audit.judge(request.metrics.compressor, request.generated, twin, whole=True)

    def end(self) -> None:
        """Give up what is under way."""
        if self._under_way is not None:
            self._engine.loop.remove(self._under_way[1])
            self._under_way = None
