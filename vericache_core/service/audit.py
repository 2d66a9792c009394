"""Watches the promise while serving: decodes a share of the answers again, plainly, and compares."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vericache_core.errors import ConfigError
from vericache_core.service.metrics import Metrics

if TYPE_CHECKING:
    from vericache_core.engine import Engine, RequestOutput
    from vericache_core.runtime.sampling_params import SamplingParams

log = logging.getLogger("vericache.service")


class IdentityAudit:
    """Decodes every ``every``-th finished answer once more without a compressor.

    An audit costs one plain decode on the engine's own thread, so ``every`` is a matter of price.

    Args:
        engine: that gave the answers.
        metrics: where mismatches are counted.
        every: 1 audits each answer.
    """

    def __init__(self, engine: Engine, metrics: Metrics, every: int) -> None:
        if every < 1:
            raise ConfigError(f"every: expected 1 or more, got {every}")
        self._engine, self._metrics, self._every, self._seen = engine, metrics, every, 0

    def consider(self, output: RequestOutput, params: SamplingParams) -> bool | None:
        """Whether ``output`` is what plain decoding gives; None if it was not its turn, or nothing can be compared.

        Answers that were cancelled or failed are compared as far as they go.
        """
        if output.metrics.compressor is None or not output.token_ids:
            return None
        self._seen += 1
        if self._seen % self._every:
            return None
        plain = self._engine.generate([list(output.prompt_token_ids)], params, compressor=None)[0]
        if plain.finish_reason == "error":
            log.warning("an audit could not decode plainly", extra={"cause": str(plain.error)})
            return None
        whole = output.finish_reason in {"stop", "length"}
        same = output.token_ids == (plain.token_ids if whole else plain.token_ids[: len(output.token_ids)])
        self._metrics.count_mismatches(output.metrics.compressor, 0 if same else 1)
        if not same:
            log.error("an answer is not the plain one", extra={"compressor": output.metrics.compressor})
        return same
