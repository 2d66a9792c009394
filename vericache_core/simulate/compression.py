"""A compressor as a few numbers, and what a request with it holds on the device."""

from __future__ import annotations

from dataclasses import dataclass

from vericache_core.runtime.costs import CostModel
from vericache_core.runtime.modes import Demand
from vericache_core.runtime.trace import Arrival


@dataclass(frozen=True, slots=True)
class Compression:
    """What a compressor is to a simulation.

    Attributes:
        keep: draft KV of a prefix as a fraction of its full KV, in bytes.
        hazard: chance per drafted token to differ.
        delta: whether a swap moves only what the draft KV lacks (token dropping) or everything (quantization).
        ring: layers of full KV on the device at a time, streamed in while the verify computes, as in the engine; 0 for
            the whole cache, streamed in ahead of it, as in the paper.
    """

    keep: float = 0.2
    hazard: float = 0.02
    delta: bool = True
    ring: int = 0


def on_device(compression: Compression, costs: CostModel, full: float, swap: float) -> float:
    """Bytes on the device while a swap of ``swap`` bytes is under way; slots of a ring hold all rows of their layers."""
    return full * min(1.0, compression.ring / costs.layers) if compression.ring else swap


def demand(arrival: Arrival, compression: Compression, token_bytes: int, costs: CostModel, tier: str, hazard: float) -> Demand:
    """What the mode choice looks at; ``hazard`` is what is believed, not what the arrival says."""
    tokens = arrival.prompt_tokens + arrival.new_tokens
    full = tokens * token_bytes
    draft = (arrival.prompt_tokens * compression.keep + arrival.new_tokens) * token_bytes
    swap = full - draft if compression.delta else full
    transient = on_device(compression, costs, full, swap)
    return Demand(tokens, full, draft, swap, transient, tier, hazard, arrival.new_tokens, ahead=not compression.ring)
