"""Watches the promise while serving: decodes a share of the answers again, plainly, and compares."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vericache_core.errors import ConfigError, VeriCacheError

if TYPE_CHECKING:
    from vericache_core.engine import Engine
    from vericache_core.outputs import RequestOutput
    from vericache_core.runtime.request import Request
    from vericache_core.runtime.sampling_params import SamplingParams
    from vericache_core.service.metrics import Metrics

log = logging.getLogger("vericache.service")


class IdentityAudit:
    """Decodes every ``every``-th answer that was drafted once more without a compressor.

    An audit costs one plain decode on the engine's own thread, prefill included: rows out of a prefix store would prove
    nothing. So ``every`` is a matter of price.

    Args:
        engine: that gave the answers.
        metrics: where mismatches are counted, besides here.
        every: 1 audits each answer.

    Attributes:
        audited: answers that were compared.
        mismatches: those that were not the plain ones; anything but 0 is an alarm.
    """

    def __init__(self, engine: Engine, metrics: Metrics | None, every: int) -> None:
        if every < 1:
            raise ConfigError(f"every: expected 1 or more, got {every}")
        self._engine, self.metrics, self._every, self._seen = engine, metrics, every, 0
        self.audited = self.mismatches = 0

    def turn(self, compressor: str | None, tokens: Sequence[int]) -> bool:
        """Whether this answer is to be audited; plain and empty ones never are."""
        if compressor is None or not tokens:
            return False
        self._seen += 1
        return self._seen % self._every == 0

    def consider(self, output: RequestOutput, params: SamplingParams) -> bool | None:
        """Whether ``output`` is what plain decoding gives; None if it was not its turn, or nothing can be compared.

        Answers that were cancelled or failed are compared as far as they go.
        """
        if not self.turn(output.metrics.compressor, output.token_ids):
            return None
        twin = self.twin(output.prompt_token_ids, params)
        if twin is None:
            return None
        try:
            while not twin.finished:
                self._engine.step()
        finally:
            self._engine.loop.remove(twin)
        whole = output.finish_reason in {"stop", "length"}
        return self.judge(output.metrics.compressor, output.token_ids, twin, whole=whole)

    def twin(self, ids: Sequence[int], params: SamplingParams) -> Request | None:
        """A plain request that the engine's loop decodes from now on; None if it takes none."""
        try:
            builder = self._engine.builder
            twin = builder.make_request(ids, params, builder.make_full_kv(None, "device"), priority=-1)
            twin.stored = False
            self._engine.loop.add(twin)
        except VeriCacheError as error:  # such as a queue that is full: the answer is as good as without an audit
            log.warning("an audit could not begin", extra={"cause": str(error)})
            return None
        return twin

    def judge(self, compressor: str | None, tokens: Sequence[int], twin: Request, *, whole: bool) -> bool | None:
        """Compare with a twin that has finished, and count; unless the answer is ``whole``, only as far as it goes."""
        if twin.error is not None:
            log.warning("an audit could not decode plainly", extra={"cause": str(twin.error)})
            return None
        same = list(tokens) == list(twin.generated if whole else twin.generated[: len(tokens)])
        self.audited += 1
        self.mismatches += not same
        if self.metrics is not None:
            self.metrics.count_mismatches(compressor, 0 if same else 1)
        if not same:
            log.error("an answer is not the plain one", extra={"compressor": compressor})
        return same
