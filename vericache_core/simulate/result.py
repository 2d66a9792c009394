"""What a simulated run gave."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Result:
    """What a simulated run gave. Seconds are virtual.

    Attributes:
        tokens: committed, of all requests.
        seconds: from the first arrival to the last token.
        peak_kv_bytes: most KV on the device at a time, swaps included.
        swap_bytes: that all swaps moved.
        swap_seconds: link time of all swaps.
        exposed_seconds: time that steps waited for them.
        windows: drafts of every verify.
        accepted: of all of them.
        proposed: tokens that the full KV was asked about without drafts.
        proposals_kept: those that it agreed with.
        draft_steps, mixed_steps, verify_steps: seconds of every step that carried drafts alone, drafts and verifies, or
            verifies alone; steps with rows of a prefill or of plain decoding are in none of them.
        latencies: from arrival to last token, of each request.
        first_tokens: from arrival to first token.
        refused: requests that the queue refused.
        background: verifies that ran beside the steps of others.
    """

    tokens: int = 0
    seconds: float = 0.0
    peak_kv_bytes: float = 0.0
    swap_bytes: float = 0.0
    swap_seconds: float = 0.0
    exposed_seconds: float = 0.0
    windows: list[int] = field(default_factory=list)
    accepted: int = 0
    proposed: int = 0
    proposals_kept: int = 0
    draft_steps: list[float] = field(default_factory=list)
    mixed_steps: list[float] = field(default_factory=list)
    verify_steps: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    refused: int = 0
    background: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Throughput."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def swap_hidden_fraction(self) -> float | None:
        """Share of link time that no step waited for; None without swaps."""
        return 1 - min(1.0, self.exposed_seconds / self.swap_seconds) if self.swap_seconds else None

    @property
    def mean_window(self) -> float:
        """Drafts of a verify on average."""
        return sum(self.windows) / len(self.windows) if self.windows else 0.0
