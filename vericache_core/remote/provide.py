"""How remote requests get the KV of their prefix: it comes once for all of them, and drafting begins while it does."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vericache_core.cache.draft import DraftKV
from vericache_core.errors import RemoteRefused
from vericache_core.remote.early import EarlyStep
from vericache_core.remote.lifecycle import Live, SessionLoop
from vericache_core.remote.prefixes import Local
from vericache_core.remote.receive import Delivery, Received, What
from vericache_core.remote.room import drafts
from vericache_core.remote.session import RemoteSession
from vericache_core.runtime.backend import threads_may_overlap
from vericache_core.runtime.request import Request
from vericache_core.runtime.segments import Segment


class PrefixLoop(SessionLoop):
    """See the module's docstring."""

    def __init__(self, *base: Any, **settings: Any) -> None:
        super().__init__(*base, **settings)
        self._early: EarlyStep | None = None

    def _lacks(self, live: Live) -> What | None:
        """What of its prefix a request needs next that is neither here nor on its way."""
        prefix, comes_home = live.prefix, live.mode.startswith(("fetch", "stream"))
        what: What
        if comes_home and prefix.rows is not None:
            return None
        if drafts(live.mode) and prefix.draft is None:
            what = "prefix"
        elif comes_home:
            what = "rows"
        else:
            return None
        return None if what in prefix.fetching else what

    def _delivery_of(self, live: Live) -> Delivery | None:
        what, prefix = self._lacks(live), live.prefix
        if what is None:
            return None
        name = str(live.session.request.metrics.compressor)
        delivery = self._receiver.delivery(
            what, prefix, name, lambda received: self._events.put(lambda: self._received(prefix, received))
        )
        prefix.fetching[what] = delivery
        return delivery

    def _provide(self, live: Live) -> None:
        prefix, request = live.prefix, live.session.request
        if drafts(live.mode) and prefix.draft is not None and request.draft is None:
            if self._early is not None and request.number in self._early.drafts:
                return  # it gets what that step has made
            if not self._equip(live, prefix.draft.twin()):
                return
        if live.mode.startswith(("fetch", "stream")) and prefix.rows is not None:
            self._come_home(live)
            return
        delivery = self._delivery_of(live)
        if delivery is not None:
            assert live.session.number is not None
            self._receiver.fetch(delivery, live.session.number, self._failing(live, delivery))

    def _equip(self, live: Live, draft: DraftKV) -> bool:
        """Let a request draft on the compressed prefix, which is complete; False if there is no room, and it has failed."""
        prefix, request = live.prefix, live.session.request
        assert prefix.draft is not None
        request.draft = draft
        request.metrics.compressed_kv_bytes = prefix.draft.device_bytes
        request.metrics.compressed_from_bytes = self._token_bytes() * len(prefix.ids)
        self._unclaim()  # what waits claims anew, with what is left
        try:
            self._room.measure(request, prefix)
        except RemoteRefused as error:
            self._fail(live, error)
            return False
        return True

    def _received(self, prefix: Local, received: Received) -> None:
        del prefix.fetching[received.what]
        prefix.take(received.draft, received.rows)
        self._room.trim()
        self.stats.received_bytes += received.bytes
        self.stats.transfers[received.what] = received.bytes, received.seconds
        self._settle_early()
        for live in list(self._remote.values()):
            if live.prefix is prefix and live.session.number is not None:
                self._provide(live)

    def _begin_early(self) -> None:
        """Let sessions make their first drafts while their prefix comes in, once their first verdicts are there.

        A verdict that comes later takes the draft back. So they are waited for, until half of the layers are here: the work
        on those must fit into the time that the rest takes.
        """
        if self._early is not None:
            return
        waiting: dict[Delivery, list[RemoteSession]] = {}
        for live in self._remote.values():
            delivery, request = live.prefix.fetching.get("prefix"), live.session.request
            if delivery is not None and drafts(live.mode) and request.draft is None and request.most_drafts:
                waiting.setdefault(delivery, []).append(live.session)
        for delivery, sessions in waiting.items():
            begins = all(session.seq for session in sessions) or 2 * delivery.come >= len(delivery.layers)
            if delivery.come and begins and threads_may_overlap(self._engine.attention, self.adapter.packed_bytes > 0):
                self._early = EarlyStep(
                    self.adapter, self._attend, delivery, sessions, lambda: self._events.put(self._settle_early)
                )
                return

    def _settle_early(self) -> None:
        """Hand out what an early step has made, when it is over and its prefix complete, or given up."""
        early = self._early
        if early is None or not early.over:
            return
        lives = [live for live in self._remote.values() if live.session.request.number in early.drafts]
        if any(live.prefix.fetching.get("prefix") is early.delivery for live in lives):
            return  # the end of the stream is still to come
        self._early = None
        segments = {segment.request.number: segment for segment in early.segments}
        for live in lives:
            session, number = live.session, live.session.request.number
            if live.prefix.draft is None:
                continue
            if early.logits is not None:
                if not self._equip(live, early.drafts[number]):
                    continue
                self._take_rows(session, segments[number], early.logits, early.seconds)
            if session.number is not None:
                self._provide(live)

    def _take_rows(self, session: RemoteSession, segment: Segment[Request], logits: Tensor, seconds: float) -> None:
        """Give a session its rows of a drafting step, ``logits [rows, vocab]``."""
        fresh = session.first_draft_at is None
        session.take(segment.want, logits[segment.first : segment.first + segment.count])
        if fresh and session.first_draft_at is not None:
            self.stats.first_draft_seconds.append(session.first_draft_at - session.added_at)
        metrics = session.request.metrics
        metrics.steps += 1
        metrics.add_seconds("draft", seconds)
        metrics.peak_device_kv_bytes = max(metrics.peak_device_kv_bytes, session.request.device_bytes())
