"""What the store streams, taken in on workers: openings of sessions, and the KV of prefixes as it comes in layer by layer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Literal

from vericache_core.cache.draft import DraftKV
from vericache_core.cache.pages import PagedRows
from vericache_core.compressor import Compressor
from vericache_core.errors import RemoteError, VeriCacheError
from vericache_core.kv import CompressedKV
from vericache_core.model.adapter import ModelAdapter
from vericache_core.remote.frames import Message
from vericache_core.remote.layers import Assembly, full_pages, take_layer
from vericache_core.remote.link import Link, Stream
from vericache_core.remote.prefixes import Local

log = logging.getLogger("vericache.remote")
OPENERS: Final = 32
"""Streams at a time: sessions on their way to be opened, and prefixes on theirs."""
What = Literal["prefix", "rows"]


@dataclass(frozen=True)
class Received:
    """KV of a prefix that has come: its draft KV for ``prefix``, full KV by layer for ``rows``."""

    what: What
    draft: DraftKV | None
    rows: dict[int, PagedRows]
    bytes: int
    seconds: float


class Receiver:
    """Streams of one link. Callbacks run on its workers.

    Args:
        link: to the store.
        adapter: the model that KV is for.
        make_compressor: name, options -> what rebuilds compressed layers.
    """

    def __init__(self, link: Link, adapter: ModelAdapter, make_compressor: Callable[[str, Any], Compressor]) -> None:
        self._link, self._adapter, self._make_compressor = link, adapter, make_compressor
        self._streams: set[Stream] = set()
        self._workers = ThreadPoolExecutor(OPENERS, "vericache-link")

    def listen(
        self, method: str, message: Message, take: Callable[[Message], None], failed: Callable[[VeriCacheError], None]
    ) -> None:
        """Pass on the messages with which the store answers ``message``; what goes wrong has ``failed``."""
        self._workers.submit(self._listen, method, message, take, failed)

    def fetch(
        self,
        what: What,
        prefix: Local,
        session: str,
        compressor: str,
        done: Callable[[Received], None],
        failed: Callable[[VeriCacheError], None],
    ) -> None:
        """Have the compressed or the full KV of ``prefix`` sent to an open session, put it together, and have it ``done``.

        Full KV that compressed KV of ``prefix`` holds exactly does not cross the link again.
        """
        layers, device, tokens = self._adapter.layers, self._adapter.device, len(prefix.ids)
        assembly = Assembly(layers, tokens, range(len(layers)))
        draft = DraftKV(layers, device, CompressedKV(compressor, {}, tokens, layers, ())) if what == "prefix" else None
        rows: dict[int, PagedRows] = {}
        started = time.monotonic()

        def take(message: Message) -> None:
            if message.kind == "end":
                assembly.finish()
                done(Received(what, draft, rows, assembly.received, time.monotonic() - started))
                return
            complete = assembly.take(message.expect("part"))
            if complete is None:
                return
            index, blob = complete
            if draft is not None:
                take_layer(draft, layers[index], blob, compressor, self._make_compressor)
            else:
                rows[index] = full_pages(layers[index], blob, tokens, prefix.draft, device)

        fields: dict[str, Any] = {"session": session}
        if what == "rows":
            fields["compressed"] = int(prefix.draft is not None)
        self.listen(what, Message(what, fields), take, failed)

    def watch(self) -> None:
        """Hang up on streams that fell silent."""
        now = time.monotonic()
        for stream in list(self._streams):
            stream.check(now)

    def cancel(self) -> None:
        """Hang up on all streams."""
        for stream in list(self._streams):
            stream.cancel()

    def close(self) -> None:
        """End the workers; the link must be closed."""
        self._workers.shutdown(wait=True, cancel_futures=True)

    def _listen(
        self, method: str, message: Message, take: Callable[[Message], None], failed: Callable[[VeriCacheError], None]
    ) -> None:
        stream = None
        try:
            stream = self._link.stream(method, message)
            self._streams.add(stream)
            for found in stream:
                take(found)
        except VeriCacheError as error:
            failed(error)
        except Exception as error:
            log.exception("receiving %s failed", method)
            failed(RemoteError(f"receiving {method} failed", cause=type(error).__name__))
        finally:
            if stream is not None:
                self._streams.discard(stream)
