"""KV of earlier prompts: taken out of a prefix store when a request starts, put in as its chunks fill up.

By the law of history independence a row that was stored is the row that would be computed, and compressing is pure, so
this changes speed only. Full KV comes by chunk; compressed KV for the very prompt that it was made of. What a store cannot
give is what prefill shows a compressor beside the rows; :func:`most_rows` leaves enough of the prompt to compute.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from vericache_core.config import EngineConfig
from vericache_core.context import Needs
from vericache_core.errors import ConfigError, SwapError
from vericache_core.kv import CompressedKV
from vericache_core.model.adapter import ModelAdapter
from vericache_core.runtime.compress import Compression
from vericache_core.runtime.request import Request
from vericache_core.stores.base import StoreCounts
from vericache_core.stores.guarded import GuardedStore
from vericache_core.stores.identity import canonical, chain
from vericache_core.stores.prefix import PrefixStore
from vericache_core.stores.saver import BackgroundSaver
from vericache_core.stores.start import client_of, look
from vericache_core.stores.url import open_store

log = logging.getLogger("vericache.runtime")


class PrefixReuse:
    """The step loop's side of a prefix store.

    Args:
        store: of the model that the loop runs.
        compressed: whether compressed KV is loaded and saved, beside full KV.
    """

    def __init__(self, store: PrefixStore, *, compressed: bool = True) -> None:
        self.store, self.saver = store, BackgroundSaver()
        self._compressed = compressed
        self._tenants = {"": store}

    @property
    def counts(self) -> dict[str, StoreCounts]:
        """What happened so far, by the tenant of requests; ``""`` are those without one."""
        return {tenant: store.counts for tenant, store in list(self._tenants.items())}

    def load(self, request: Request, compression: Compression) -> None:
        """Begin a request that starts with what is stored of its tokens; its full KV must be empty.

        ``compression`` gets compressed KV that is found, and has nothing to see of the prefill then.

        Raises:
            SwapError: the tier of its full KV failed; the store itself only ever costs time.
        """
        if request.full.tokens or not request.stored:
            return
        started = time.perf_counter()
        if self._may_hold_compressed(request):
            self._load_compressed(request, compression)
        needs = compression.needs(request)
        most = most_rows(request.compress_at, needs)
        whole = request.prefix_only and not needs.queries and not needs.attention_mass
        if whole or most >= 1:
            self._load_full(request, request.compress_at if whole else most)
        request.metrics.add_seconds("load", time.perf_counter() - started)

    def _load_full(self, request: Request, most: int) -> None:
        store, metrics = self._of(request), request.metrics
        loaded = store.load(request.tokens, request.full, most=most, whole=request.prefix_only)
        metrics.prefix_tokens_loaded += loaded.tokens
        metrics.prefix_bytes_loaded += loaded.bytes
        metrics.degraded += [f"prefix store: {fault}" for fault in loaded.faults]
        request.chunks_stored = max(request.chunks_stored, -(-loaded.tokens // store.chunk))
        if loaded.tokens:
            log.debug("request %d: %d of %d tokens loaded", request.number, loaded.tokens, len(request.tokens))

    def _load_compressed(self, request: Request, compression: Compression) -> None:
        assert request.compressor is not None
        found = self._of(request).compressed.load(
            request.tokens[: request.compress_at],
            request.compressor,
            seed=request.params.seed,
            protected=request.protected,
            needed=[layer.index for layer in compression.adapter.layers if layer.index not in request.full.pinned],
            device=compression.adapter.device,
        )
        if found.fault is not None:
            request.metrics.degraded.append(f"prefix store: {found.fault}")
        if found.compressed is not None:
            request.metrics.compressed_bytes_loaded += found.bytes
            compression.provide(request, found.compressed)

    def keep(self, request: Request, rows: int) -> None:
        """The next ``rows`` rows that the last step wrote are to count: copy the chunks that they fill, to be saved.

        Called before sliding windows move on, and only with rows of committed tokens.
        """
        if not request.stored:
            return
        store = self._of(request)
        chunk, before = store.chunk, request.full.tokens
        try:
            for number in range(max(before // chunk, request.chunks_stored), (before + rows) // chunk):
                known = request.tokens[: (number + 1) * chunk]
                request.links = chain(store.identity, known, chunk, request.links)
                if self.saver.offer(store, store.capture(request.tokens, request.full, number, request.links)):
                    request.chunks_stored = number + 1
            if request.prefix_only and before + rows == request.prompt_tokens:
                tail = store.capture_tail(request.tokens[: request.prompt_tokens], request.full, request.links)
                if tail is not None:
                    self.saver.offer(store, tail)
        except SwapError as error:  # a step that needs these rows will see for itself
            log.warning("request %d: rows from %d on are not saved (%s)", request.number, before, error)

    def keep_compressed(self, request: Request, compressed: CompressedKV) -> None:
        """The prefix of a request was compressed: copy it, to be saved."""
        if not self._may_hold_compressed(request):
            return
        store = self._of(request).compressed
        try:
            ids = request.tokens[: request.compress_at]
            packed = store.capture(ids, compressed, seed=request.params.seed, protected=request.protected)
        except Exception as error:  # noqa: BLE001 (whatever a plugin's own layers raise costs speed, never tokens)
            log.warning("request %d: its compressed KV is not saved (%s: %s)", request.number, type(error).__name__, error)
            return
        self.saver.offer(store, packed)

    def close(self) -> None:
        """Save what waits, for a few seconds at most, and close the store."""
        self.saver.close()
        self.store.close()

    def _may_hold_compressed(self, request: Request) -> bool:
        """Whether the compressed KV of a request is worth a place: that of a prompt, not of what a preemption interrupted."""
        if (
            not (self._compressed and request.stored)
            or request.compressor is None
            or request.compress_at != request.prompt_tokens
        ):
            return False
        return request.prefix_only or request.prompt_tokens >= self.store.chunk

    def _of(self, request: Request) -> PrefixStore:
        """The store as the tenant of ``request`` sees it."""
        found = self._tenants.get(request.tenant)
        if found is None:
            salt = canonical([self.store.identity.tenant, request.tenant])
            found = self._tenants[request.tenant] = self.store.of(salt)
        return found


def most_rows(tokens: int, needs: Needs) -> int:
    """Rows of a prefix of ``tokens`` tokens that may be loaded: computing the rest gives what is needed beside rows.

    That is the first logits and the observation window. Attention mass sums over all queries, so it leaves nothing.
    """
    return 0 if needs.attention_mass else tokens - max(1, needs.queries)


def open_reuse(config: EngineConfig, adapter: ModelAdapter, tokenizer: Any, attention: str) -> PrefixReuse | None:
    """What ``prefix_store`` asks for, None if it asks for nothing.

    Raises:
        ConfigError: the URL is wrong, or the store is required and does not answer.
    """
    if config.prefix_store is None:
        return None
    opened = open_store(config.prefix_store)
    client = client_of(opened)
    if opened.required:  # of the very store that will be used, however the engine came about
        try:
            look(config.prefix_store, opened, client)
        except ConfigError:
            client.close()
            raise
    from vericache_core.stores.describe import describe_model

    identity = describe_model(adapter, tokenizer, attention, config.tenant)
    store = PrefixStore(GuardedStore(client), identity, adapter.layers, opened.chunk, opened.timeout)
    return PrefixReuse(store, compressed=opened.compressed)
