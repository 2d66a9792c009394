"""What a prefix store did, by tenant, as metrics: read from the counters that it keeps anyway when a scraper asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily

    from vericache_core.runtime.reuse import PrefixReuse

_EVENTS: Final = (
    "chunks_loaded",
    "chunks_saved",
    "misses",
    "compressed_loaded",
    "compressed_saved",
    "compressed_misses",
    "faults",
)


class StoreCollector:
    """A collector of prometheus-client.

    Tenants are few: those of a token file or of a certificate authority, and ``none`` for requests without one.
    """

    def __init__(self, reuse: PrefixReuse) -> None:
        self._reuse = reuse

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Return ``vericache_prefix_store_events_total`` and ``vericache_prefix_store_bytes_total``."""
        from prometheus_client.core import CounterMetricFamily

        events = CounterMetricFamily(
            "vericache_prefix_store_events", "What happened to blobs of the prefix store.", labels=["event", "tenant"]
        )
        moved = CounterMetricFamily(
            "vericache_prefix_store_bytes", "Bytes of blobs; in is towards this process.", labels=["direction", "tenant"]
        )
        for tenant, counts in self._reuse.counts.items():
            name = tenant or "none"
            for event in _EVENTS:
                events.add_metric([event, name], getattr(counts, event))
            moved.add_metric(["in", name], counts.bytes_loaded)
            moved.add_metric(["out", name], counts.bytes_saved)
        yield events
        yield moved
