"""Prometheus metrics of one service, under one registry of its own.

Names, units and labels are part of the interface. Labels name compressors, never requests; ``none`` is plain decoding.

Two conventions. The mean acceptance length counts the token that the full KV adds to every verify, as vLLM's does:
``1 + accepted_tokens / drafts``. Several tokens committed at once share the time since the commit before, so that the
sum of the inter-token latency is time and its count is tokens.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Final, Literal

from vericache_core._version import __version__
from vericache_core.errors import MissingDependencyError
from vericache_core.plugins.spec import API_VERSION

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

Cache = Literal["full", "draft"]
Tier = Literal["device", "host", "disk"]
PLAIN: Final = "none"
"""Label of what no compressor had a part in."""
_FAST = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_SLOW = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)


class Metrics:
    """Counters, gauges and histograms; every method may be called from any thread.

    Attributes:
        registry: of prometheus-client; further collectors of the service may be registered there.

    Raises:
        MissingDependencyError: prometheus-client is not installed.
    """

    def __init__(self) -> None:
        try:
            import prometheus_client as client
        except ImportError as missing:
            raise MissingDependencyError(
                "metrics need the package prometheus-client", hint="pip install 'vericache[metrics]'"
            ) from missing
        self.registry: CollectorRegistry = client.CollectorRegistry()
        by, own = ["compressor"], self.registry

        def counter(name: str, text: str, labels: list[str]) -> client.Counter:
            return client.Counter(f"vericache_{name}", text, labels, registry=own)

        def histogram(name: str, text: str, labels: list[str], buckets: tuple[float, ...]) -> client.Histogram:
            return client.Histogram(f"vericache_{name}", text, labels, registry=own, buckets=buckets)

        self._draft_tokens = counter("draft_tokens_total", "Drafted tokens that a verify decided on.", by)
        self._accepted_tokens = counter("accepted_tokens_total", "Drafted tokens that the full KV agreed with.", by)
        self._drafts = counter("drafts_total", "Drafts verified; mean acceptance length is 1 + accepted / drafts.", by)
        self._positions = counter(
            "accepted_tokens_per_position_total", "Accepted tokens by position in the draft, from 0.", ["position", *by]
        )
        self._kv = client.Gauge("vericache_kv_bytes", "Bytes of KV held.", ["cache", "tier"], registry=own)
        self._swap_bytes = counter("swap_bytes_total", "Bytes of KV moved; in is towards the device.", ["direction"])
        self._prompt_tokens = counter(
            "prompt_tokens_total", "Prompt tokens by where their KV came from: computed, or the prefix store.", ["source"]
        )
        self._swap = histogram("swap_seconds", "Link time of the swaps of one verify.", [], _FAST)
        self._compress = histogram("compress_seconds", "Time of one compression or fold.", by, _SLOW)
        self._verify = histogram("verify_seconds", "Time of one step that verified.", by, _FAST)
        self._mismatches = counter("identity_mismatch_total", "Audited outputs that differ from plain decoding.", by)
        self._near_ties = counter("near_tie_total", "Committed tokens that hardly led the runner-up; not an error.", by)
        self._first_token = histogram(
            "time_to_first_token_seconds", "From the arrival of a request to its first token.", by, _SLOW
        )
        self._inter_token = histogram("inter_token_latency_seconds", "Time between two tokens of a request.", by, _FAST)
        build = client.Info("vericache_build", "Versions of what runs.", registry=own)
        build.info({"version": __version__, "api_version": str(API_VERSION), "python_version": platform.python_version()})
        self.count_mismatches(None, 0)  # an alert on a counter needs it to be there before it first moves

    def count_round(self, compressor: str | None, drafted: int, accepted: int) -> None:
        """A verify decided on ``drafted`` tokens and agreed with the first ``accepted`` of them."""
        name = compressor or PLAIN
        self._drafts.labels(name).inc()
        self._draft_tokens.labels(name).inc(drafted)
        self._accepted_tokens.labels(name).inc(accepted)
        for position in range(accepted):
            self._positions.labels(str(position), name).inc()

    def time_verify(self, compressor: str | None, seconds: float) -> None:
        """A verify took ``seconds``."""
        self._verify.labels(compressor or PLAIN).observe(seconds)

    def time_compress(self, compressor: str | None, seconds: float) -> None:
        """A compression, or a fold of verified rows, took ``seconds``."""
        self._compress.labels(compressor or PLAIN).observe(seconds)

    def count_swap(self, nbytes: float, seconds: float) -> None:
        """``nbytes`` of KV came to the device over a link that it kept busy for ``seconds``."""
        self._swap_bytes.labels("in").inc(nbytes)
        self._swap.observe(seconds)

    def count_offload(self, nbytes: float) -> None:
        """``nbytes`` of KV left the device for another tier."""
        self._swap_bytes.labels("out").inc(nbytes)

    def count_prompt(self, source: Literal["computed", "store"], tokens: int) -> None:
        """Rows of so many prompt tokens were computed, or came out of the prefix store."""
        self._prompt_tokens.labels(source).inc(tokens)

    def set_kv_bytes(self, cache: Cache, tier: Tier, nbytes: float) -> None:
        """So much KV is held now."""
        self._kv.labels(cache, tier).set(nbytes)

    def time_first_token(self, compressor: str | None, seconds: float) -> None:
        """The first token of a request came ``seconds`` after it arrived."""
        self._first_token.labels(compressor or PLAIN).observe(seconds)

    def time_tokens(self, compressor: str | None, tokens: int, seconds: float) -> None:
        """``tokens`` more came together, ``seconds`` after those before them."""
        latency = self._inter_token.labels(compressor or PLAIN)
        for _ in range(tokens):
            latency.observe(seconds / tokens)

    def count_near_ties(self, compressor: str | None, tokens: int) -> None:
        """So many committed tokens hardly led."""
        self._near_ties.labels(compressor or PLAIN).inc(tokens)

    def count_mismatches(self, compressor: str | None, outputs: int) -> None:
        """So many audited outputs were not what plain decoding gives."""
        self._mismatches.labels(compressor or PLAIN).inc(outputs)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """What a scraper gets, and its content type, in the format that the header ``accept`` asks for."""
        from prometheus_client.exposition import choose_encoder

        encode, content_type = choose_encoder(accept)
        body: bytes = encode(self.registry)
        return body, content_type
