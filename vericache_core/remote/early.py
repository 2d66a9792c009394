"""The first drafts of requests whose compressed prefix is still coming in: a layer is computed as soon as it is here.

Layer i of a step needs layer i of the compressed KV and nothing of those behind it. So the step keeps up with the link, and
the first drafts are there one layer's work after the last layer, instead of a whole step. It runs on a thread of its own
over draft KV that no request holds yet; requests get both when all has come, and nothing has happened if that fails.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from vericache_core.attention.paged import AttentionJob
from vericache_core.cache.draft import DraftKV
from vericache_core.errors import RemoteError
from vericache_core.kv import LayerDescriptor
from vericache_core.model.adapter import ModelAdapter
from vericache_core.remote.receive import Delivery
from vericache_core.remote.session import RemoteSession
from vericache_core.runtime.request import Request
from vericache_core.runtime.segments import Segment
from vericache_core.runtime.tile import AttendFunction, TileAttention

log = logging.getLogger("vericache.remote")


class EarlyStep:
    """One step, which begins at once.

    Args:
        adapter: the model.
        attend: fixed-block attention in use.
        delivery: brings the compressed prefix.
        sessions: on that prefix, without draft KV; as many as fit into a step take part.
        ended: called on the step's thread when it is over.

    Attributes:
        segments: rows of those that take part.
        drafts: their draft KV by number of the request: the prefix, as far as its layers were computed.
        logits: ``[rows, vocab]``; None while it runs, and if it failed.
        over: whether it has ended.
        seconds: that it computed, without waiting for layers.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        attend: AttendFunction,
        delivery: Delivery,
        sessions: Sequence[RemoteSession],
        ended: Callable[[], None],
    ) -> None:
        assert delivery.draft is not None
        self.delivery, self._adapter, self._ended = delivery, adapter, ended
        self.segments: list[Segment[Request]] = []
        first = 0
        for session in sessions:
            want = session.opening(delivery.draft.prefix_tokens, adapter.most_rows - first)
            if want is not None:
                self.segments.append(Segment(session.request, want, first, len(want.tokens)))
                first += len(want.tokens)
        self.drafts = {segment.request.number: delivery.draft.bare_twin() for segment in self.segments}
        self.logits: Tensor | None = None
        self.over, self.seconds = False, 0.0
        self._attention = _AsTheyCome(adapter.layers, self.segments, attend, delivery, self.drafts)
        # It ends with the step: an idle thread that has computed slows the teams of others down.
        self._thread = threading.Thread(target=self._run, name="vericache-early", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until it is over; the streams must have ended, or have been told to."""
        self._thread.join()

    def _run(self) -> None:
        started = time.perf_counter()
        tokens = [token for segment in self.segments for token in segment.want.tokens]
        positions = [segment.want.position + i for segment in self.segments for i in range(segment.count)]
        try:
            self.logits = self._adapter.step(tokens, positions, self._attention)
        except RemoteError as error:  # the stream has told its requests, too
            log.debug("no first drafts while a prefix comes in: %s", error)
        except Exception:
            log.warning("first drafts while a prefix came in failed; they are computed anew", exc_info=True)
        self.seconds = time.perf_counter() - started - self._attention.waited
        self.over = True
        self._ended()


class _AsTheyCome(TileAttention):
    """Waits for each layer before it attends to it.

    Attributes:
        waited: seconds, altogether.
    """

    def __init__(
        self,
        layers: Sequence[LayerDescriptor],
        segments: Sequence[Segment[Request]],
        attend: AttendFunction,
        delivery: Delivery,
        drafts: dict[int, DraftKV],
    ) -> None:
        super().__init__(layers, segments, attend, see_nothing, self._wait)
        self._delivery, self._drafts = delivery, drafts
        self.waited = 0.0

    def _wait(self, index: int) -> None:
        started = time.perf_counter()
        self._delivery.layers[index].result()
        self.waited += time.perf_counter() - started
        assert self._delivery.draft is not None
        for draft in self._drafts.values():
            draft.share(index, self._delivery.draft)

    def _job(self, segment: Segment[Request], layer: LayerDescriptor) -> AttentionJob:
        want = segment.want
        pages, base, prefix = self._drafts[segment.request.number].layer(layer.index)
        return AttentionJob(segment.first, segment.count, pages, base, want.position, layer.sliding_window, prefix)


def see_nothing(_segment: Segment[Request], _layer: int, _queries: Tensor, _keys: Tensor) -> None:
    """Draft rows are observed by nobody."""
