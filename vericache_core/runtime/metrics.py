"""What one request cost and gained, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

NEAR_TIE = 0.05
"""Lead of a token over the runner-up below which it may fall otherwise where sums are rounded in another order: logits
of bf16 models were seen to differ by up to 0.04 between one row and many."""


@dataclass
class RequestMetrics:
    """Counters of one request. Bytes are measured from live storages, times are wall seconds.

    A step serves several requests; each counts the whole step under the phase it was in. A verify in the background
    counts its own time, from start to end.

    Attributes:
        compressor: name, or ``None`` for plain full-KV decoding.
        identity: the promise the run was made under, ``bitwise`` or ``token``.
        drafted, accepted: drafted tokens, and those the full KV agreed with. A rejection counts everything
            drafted behind it as drafted; what the end of a request leaves undecided is not counted.
        rounds: verify rounds; ``accepted_per_round`` and ``drafted_per_round`` list them in order.
        steps: model steps this request had rows in.
        prompt_tokens, new_tokens: lengths.
        swap_bytes: bytes of full KV moved to the device.
        offload_bytes: bytes of full KV moved from the device to its tier.
        swap_seconds: time its swaps kept the link busy, hidden behind compute or not.
        peak_device_kv_bytes: most device KV held at once: draft KV, resident full KV and ring slots.
        full_kv_bytes: bytes of the full KV rows, wherever they live.
        compressed_kv_bytes: bytes of the compressed prefix when it was made, survivors or codes and map.
        compressed_from_bytes: bytes of the full KV that it stands for.
        seconds: by phase: ``load`` (prefix store), ``prefill``, ``compress``, ``draft``, ``verify``, ``decode`` (plain).
        proposed, proposals_kept: tokens of the proposer, and those that the next stage agreed with.
        near_ties: committed tokens that led by less than ``NEAR_TIE`` logits; nothing is wrong with them.
        prefix_tokens_loaded, prefix_bytes_loaded: rows that came from the prefix store, and the blobs they came in.
        compressed_bytes_loaded: of the blob that its compressed prefix came in from the prefix store; 0 if it was made here.
        prefilled: rows of prompt (or of what a preemption interrupted) that were computed.
        preemptions: times it gave everything back to let others run.
        windows: window of each round, where they are chosen (``window="auto"``); 0 is one plain token.
        mode: ``plain``, ``pinned``, ``offloaded`` or ``remote``.
        identical: whether an audit found the answer to be that of plain decoding; None if it was not audited.
        degraded: why the request fell back to plain decoding or recomputed, if it did.
    """

    compressor: str | None = None
    identity: str = "bitwise"
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    drafted_per_round: list[int] = field(default_factory=list)
    accepted_per_round: list[int] = field(default_factory=list)
    steps: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    swap_bytes: int = 0
    offload_bytes: int = 0
    swap_seconds: float = 0.0
    peak_device_kv_bytes: int = 0
    full_kv_bytes: int = 0
    compressed_kv_bytes: int = 0
    compressed_from_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    proposed: int = 0
    proposals_kept: int = 0
    near_ties: int = 0
    prefix_tokens_loaded: int = 0
    prefix_bytes_loaded: int = 0
    compressed_bytes_loaded: int = 0
    prefilled: int = 0
    preemptions: int = 0
    windows: list[int] = field(default_factory=list)
    mode: str = "plain"
    identical: bool | None = None
    degraded: list[str] = field(default_factory=list)

    @property
    def acceptance(self) -> float:
        """Accepted share of drafted tokens; 0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def add_seconds(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
