"""What the store streams, taken in on workers: openings of sessions, and the KV of prefixes as it comes in layer by layer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
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


class Delivery:
    """Puts the KV of a prefix together as it comes in. Full KV that compressed KV of it holds exactly does not cross the link.

    Args:
        adapter: the model that KV is for.
        make_compressor: name, options -> what rebuilds compressed layers.
        what: compressed or full KV.
        compressor: by its name.
        done: gets all of it, once it is complete.

    Attributes:
        holds_compressed: whether compressed KV of the prefix is here already.
        draft: its compressed KV, as far as it has come; None where full KV comes.
        layers: done one after the other as they come in; all that are still to come end with what went wrong.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        make_compressor: Callable[[str, Any], Compressor],
        what: What,
        prefix: Local,
        compressor: str,
        done: Callable[[Received], None],
    ) -> None:
        self.what, self.holds_compressed = what, prefix.draft is not None
        self._layers, self._device, self._tokens = adapter.layers, adapter.device, len(prefix.ids)
        self._make_compressor, self._compressor, self._held, self._done = make_compressor, compressor, prefix.draft, done
        self._assembly = Assembly(self._layers, self._tokens, range(len(self._layers)))
        empty = CompressedKV(compressor, {}, self._tokens, self._layers, ())
        self.draft = DraftKV(self._layers, self._device, empty) if what == "prefix" else None
        self.layers: list[Future[None]] = [Future() for _ in self._layers]
        self._rows: dict[int, PagedRows] = {}
        self._started, self._ended = time.monotonic(), False

    def take(self, message: Message) -> None:
        """Take in a part of it, or its end.

        Raises:
            RemoteError: it is not what was due.
        """
        if message.kind == "end":
            self._assembly.finish()
            self._ended = True
            seconds = time.monotonic() - self._started
            self._done(Received(self.what, self.draft, self._rows, self._assembly.received, seconds))
            return
        complete = self._assembly.take(message.expect("part"))
        if complete is None:
            return
        index, blob = complete
        layer = self._layers[index]
        if self.draft is not None:
            take_layer(self.draft, layer, blob, self._compressor, self._make_compressor)
        else:
            self._rows[index] = full_pages(layer, blob, self._tokens, self._held, self._device)
        self.layers[index].set_result(None)

    def check_complete(self) -> None:
        """Raise ``RemoteError`` unless all of it has come, and its end."""
        if not self._ended:
            raise RemoteError("the stream of layers ended early", cause=f"{self.come} of {len(self.layers)} layers came")

    @property
    def come(self) -> int:
        """Layers that are here."""
        return sum(layer.done() for layer in self.layers)

    def fail(self, error: VeriCacheError) -> None:
        """The rest does not come."""
        for layer in self.layers:
            if not layer.done():
                layer.set_exception(error)


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
        self,
        method: str,
        message: Message,
        take: Callable[[Message], None],
        failed: Callable[[VeriCacheError], None],
        delivery: Delivery | None = None,
    ) -> None:
        """Have ``take`` get the answers to ``message``, but ``delivery`` parts of KV, and ``failed`` what goes wrong."""
        self._workers.submit(self._listen, method, message, take, failed, delivery)

    def delivery(self, what: What, prefix: Local, compressor: str, done: Callable[[Received], None]) -> Delivery:
        """What takes the compressed or the full KV of ``prefix`` in, message by message."""
        return Delivery(self._adapter, self._make_compressor, what, prefix, compressor, done)

    def fetch(self, delivery: Delivery, session: str, failed: Callable[[VeriCacheError], None]) -> None:
        """Ask an open session for what ``delivery`` takes in."""
        message = Message(delivery.what, {"session": session, "compressed": int(delivery.holds_compressed)})
        self.listen(delivery.what, message, delivery.take, failed, delivery)

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
        self,
        method: str,
        message: Message,
        take: Callable[[Message], None],
        failed: Callable[[VeriCacheError], None],
        delivery: Delivery | None,
    ) -> None:
        def end(error: VeriCacheError) -> None:
            if delivery is not None:
                delivery.fail(error)
            failed(error)

        stream = None
        try:
            stream = self._link.stream(method, message)
            self._streams.add(stream)
            for found in stream:
                if delivery is not None and found.kind in {"part", "end"}:
                    delivery.take(found)
                else:
                    take(found)
            if delivery is not None:
                delivery.check_complete()
        except VeriCacheError as error:
            end(error)
        except Exception as error:
            log.exception("receiving %s failed", method)
            end(RemoteError(f"receiving {method} failed", cause=type(error).__name__))
        finally:
            if stream is not None:
                self._streams.discard(stream)
