"""Prefixes on their way to the shelf: out of the prefix store what it has of them, computed and compressed what it lacks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from vericache_core.engine import Engine
from vericache_core.errors import CompressorFault, RemoteRefused, VeriCacheError
from vericache_core.index_map import HeadMap
from vericache_core.kv import PlainLayer
from vericache_core.remote.layers import Blob, compressed_blobs
from vericache_core.remote.shelf import Prefix, Shelf, prefix_key
from vericache_core.runtime.request import Request
from vericache_core.runtime.sampling_params import SamplingParams

log = logging.getLogger("vericache.remote")


@dataclass(frozen=True)
class Ask:
    """What a client wants to open.

    Attributes:
        tenant: who asks.
        ids: prompt.
        prefix: tokens of it that are shared; fewer than all.
        compressor, options: what the prefix is compressed with; None if it is not to be sent.
        generate: the store generates by itself, without drafts.
        stateless: its full KV comes from the store's slower tier for every verify instead of staying on the device.
    """

    tenant: str
    ids: tuple[int, ...]
    prefix: int
    compressor: str | None
    options: Mapping[str, Any]
    params: SamplingParams
    generate: bool = False
    stateless: bool = False


@dataclass(eq=False)
class _Coming:
    """A prefix on its way, the request that makes it, and who waits for it."""

    key: str
    ids_key: str
    request: Request
    waiters: list[Future[Prefix]] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return self.request.finished or self.request.full.tokens >= self.request.prompt_tokens


class Preparations:
    """On the engine's thread; the request of a prefix is one of the step loop's.

    Args:
        engine: whose loop computes.
        shelf: where prefixes go.
        most: prefixes on their way at a time.
    """

    def __init__(self, engine: Engine, shelf: Shelf, most: int) -> None:
        self._engine, self._shelf, self._most = engine, shelf, most
        self._coming: dict[int, _Coming] = {}

    def progress(self) -> tuple[int, int]:
        """Prompt rows that are there, and those that are to be, of everything under way; from any thread."""
        requests = [coming.request for coming in list(self._coming.values())]
        return sum(request.full.tokens for request in requests), sum(request.prompt_tokens for request in requests)

    def begin(self, ask: Ask, result: Future[Prefix]) -> None:
        """Have the prefix ready some time; its user count is one higher when it comes.

        Raises:
            RemoteRefused: there are too many on their way.
        """
        ids = ask.ids[: ask.prefix]
        compressor = None if ask.compressor is None else self._engine.compressors.make(ask.compressor, ask.options)
        spelled: dict[str, Any] = {}
        if compressor is not None:  # as it says itself, with defaults, so that two ways to say the same meet
            spelled = dict(
                compressor.restore(0, [None] * len(self._engine.adapter.layers), self._engine.adapter.layers).options
            )
        key, ids_key = prefix_key(ask.tenant, ids, ask.compressor, spelled), prefix_key(ask.tenant, ids, None, {})
        found = self._shelf.get(key) if ask.compressor else self._shelf.with_full(ids_key)
        if found is not None:
            found.users += 1
            result.set_result(found)
            return
        for coming in self._coming.values():
            if coming.key == key:
                coming.waiters.append(result)
                return
        if len(self._coming) >= self._most:
            raise RemoteRefused("the store prepares as many prefixes as it may", hint="try again later")
        # One token more than is of use: the request must still be there, with its caches, when its prefix is done.
        params = SamplingParams(max_new_tokens=2, ignore_eos=True)
        request = self._engine.builder.make_request(
            ids, params, self._engine.builder.make_full_kv(compressor, "device"), compressor
        )
        request.metrics.compressor, request.tenant, request.prefix_only = ask.compressor, ask.tenant, True
        self._engine.loop.add(request)
        self._coming[request.number] = _Coming(key, ids_key, request, [result])

    def settle(self) -> None:
        """Put on the shelf what the last step completed."""
        for number, coming in list(self._coming.items()):
            if coming.complete:
                del self._coming[number]
                self._shelve(coming)

    def end(self, error: VeriCacheError) -> None:
        """Give everything up; whoever waits gets ``error``."""
        given_up = list(self._coming.values())
        self._coming.clear()
        for coming in given_up:  # all of them, before anything that may fail
            for waiter in coming.waiters:
                waiter.set_exception(error)
        for coming in given_up:
            self._engine.loop.remove(coming.request)

    def _shelve(self, coming: _Coming) -> None:
        request = coming.request
        self._engine.loop.release(request)
        metrics, failure = request.metrics, request.error
        if failure is None and metrics.compressor is not None and request.draft is None:
            failure = CompressorFault("the prefix could not be compressed", cause=metrics.degraded[-1])
        if failure is not None:
            request.close()
            for waiter in coming.waiters:
                waiter.set_exception(failure)
            return
        blobs: list[Blob] = []
        maps: dict[int, HeadMap] = {}
        if request.draft is not None:
            compressed = request.draft.current()
            blobs = compressed_blobs(compressed, request.full)
            maps = {i: layer.surviving for i, layer in enumerate(compressed.layers) if isinstance(layer, PlainLayer)}
            request.forget_draft()
        computed = request.full.tokens - metrics.prefix_tokens_loaded
        how = (
            ""
            if metrics.compressor is None
            else ", compressed KV loaded"
            if metrics.compressed_bytes_loaded
            else ", compressed"
        )
        log.info("prefix of %d tokens: %d rows computed%s", request.full.tokens, computed, how)
        prefix = Prefix(coming.key, coming.ids_key, request.full.tokens, request.full, blobs, maps, users=len(coming.waiters))
        self._shelf.put(prefix)
        for waiter in coming.waiters:
            waiter.set_result(prefix)
