"""Rows of earlier prompts: taken out of a prefix store when a request starts, put in as its chunks fill up.

By the law of history independence a row that was stored is the row that would be computed, so this changes speed only.
What a store cannot give is what prefill shows a compressor beside the rows; :func:`most_rows` leaves enough of the
prompt to compute.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from vericache_core.config import EngineConfig
from vericache_core.context import Needs
from vericache_core.errors import ConfigError, SwapError
from vericache_core.model.adapter import ModelAdapter
from vericache_core.runtime.request import Request
from vericache_core.stores.client import StoreClient
from vericache_core.stores.client_policy import ClientPolicy
from vericache_core.stores.guarded import GuardedStore
from vericache_core.stores.identity import chain
from vericache_core.stores.prefix import PrefixStore
from vericache_core.stores.saver import BackgroundSaver
from vericache_core.stores.url import open_store

log = logging.getLogger("vericache.runtime")


class PrefixReuse:
    """The step loop's side of a prefix store.

    Args:
        store: of the model that the loop runs.
    """

    def __init__(self, store: PrefixStore) -> None:
        self.store, self.saver = store, BackgroundSaver(store)

    def load(self, request: Request, needs: Needs) -> None:
        """Fill the empty full KV of a request that starts with the longest stored prefix of its tokens.

        ``needs`` is what its compressor must be shown while the rest is computed.

        Raises:
            SwapError: the tier of its full KV failed; the store itself only ever costs time.
        """
        most = most_rows(request.compress_at, needs)
        if most < 1 or request.full.tokens:
            return
        started = time.perf_counter()
        loaded = self.store.load(request.tokens, request.full, most=most)
        metrics = request.metrics
        metrics.add_seconds("load", time.perf_counter() - started)
        metrics.prefix_tokens_loaded += loaded.tokens
        metrics.prefix_bytes_loaded += loaded.bytes
        metrics.degraded += [f"prefix store: {fault}" for fault in loaded.faults]
        request.chunks_stored = max(request.chunks_stored, -(-loaded.tokens // self.store.chunk))
        if loaded.tokens:
            log.debug("request %d: %d of %d tokens loaded", request.number, loaded.tokens, len(request.tokens))

    def keep(self, request: Request, rows: int) -> None:
        """The next ``rows`` rows that the last step wrote are to count: copy the chunks that they fill, to be saved.

        Called before sliding windows move on, and only with rows of committed tokens.
        """
        chunk, before = self.store.chunk, request.full.tokens
        for number in range(max(before // chunk, request.chunks_stored), (before + rows) // chunk):
            known = request.tokens[: (number + 1) * chunk]
            request.links = chain(self.store.identity, known, chunk, request.links)
            try:
                copied = self.store.capture(request.tokens, request.full, number, request.links)
            except SwapError as error:  # a step that needs these rows will see for itself
                log.warning("request %d: chunk %d is not saved (%s)", request.number, number, error)
                return
            if self.saver.offer(copied):
                request.chunks_stored = number + 1

    def close(self) -> None:
        """Save what waits, for a few seconds at most, and close the store."""
        self.saver.close()
        self.store.close()


def most_rows(tokens: int, needs: Needs) -> int:
    """Rows of a prefix of ``tokens`` tokens that may be loaded: computing the rest gives what is needed beside rows.

    That is the first logits and the observation window. Attention mass sums over all queries, so it leaves nothing.
    """
    return 0 if needs.attention_mass else tokens - max(1, needs.queries)


def open_reuse(config: EngineConfig, adapter: ModelAdapter, tokenizer: Any, attention: str) -> PrefixReuse | None:
    """What ``prefix_store`` asks for, None if it asks for nothing.

    Raises:
        ConfigError: the URL is wrong, or rows are not promised to have the same bits every time.
    """
    if config.prefix_store is None:
        return None
    if config.identity != "bitwise":
        raise ConfigError(
            "prefix_store needs identity='bitwise'",
            cause="without that promise a stored row need not be the row that would be computed",
        )
    opened = open_store(config.prefix_store)
    from vericache_core.stores.describe import describe_model

    identity = describe_model(adapter, tokenizer, attention, config.tenant)
    blobs = GuardedStore(StoreClient(opened.blobs, ClientPolicy(attempts=opened.attempts)))
    return PrefixReuse(PrefixStore(blobs, identity, adapter.layers, opened.chunk, opened.timeout))
