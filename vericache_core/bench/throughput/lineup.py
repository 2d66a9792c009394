"""Which systems run: those that need no other environment, by their names on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from vericache_core.bench.throughput.rows import PLAIN

if TYPE_CHECKING:
    from vericache_core.bench.throughput.engines import Shop
    from vericache_core.bench.throughput.measured import System

SYSTEMS: Final = (
    "vericache",
    "auto",
    "lockstep",
    "lossy",
    "ngram",
    "transformers",
    "transformers-offloaded",
    "transformers-lookup",
)
"""Besides plain, which always runs."""


def own_systems(
    shop: Shop, kinds: Sequence[str], settings: Sequence[tuple[str, dict[str, Any]]], windows: Sequence[int | str]
) -> list[System]:
    """Plain, and the systems that need no other environment, in the order of the table."""
    # Here, so that the command line can name the systems without torch.
    from vericache_core.bench.throughput.engines import EngineSystem
    from vericache_core.bench.throughput.huggingface import HuggingFaceSystem

    own: list[System] = [EngineSystem(shop, PLAIN, {"compressor": None, "options": {}, "proposer": "none"})]
    for number, (name, options) in enumerate(settings):
        label = name + (":" + ",".join(f"{key}={value}" for key, value in options.items()) if options else "")
        changes = {"compressor": name, "options": options}
        if "vericache" in kinds:
            chosen = {f" x{window}": {"window": window} for window in windows} or {"": {}}
            own += [EngineSystem(shop, f"vericache {label}{more}", {**changes, **change}) for more, change in chosen.items()]
        if "auto" in kinds:
            # A look into the text so far costs nothing, and what it is worth is chosen by cost, too.
            proposer = "ngram" if shop.config.proposer == "none" else shop.config.proposer
            choices = {**changes, "window": "auto", "mode": "auto", "proposer": proposer}
            own.append(EngineSystem(shop, f"auto {label}" if number else "auto", choices))
        if "lockstep" in kinds:
            own.append(EngineSystem(shop, f"lockstep {label}", {**changes, "scheduler": "lockstep"}))
        if "lossy" in kinds:
            own.append(EngineSystem(shop, f"lossy {label}", changes, lossy=True))
    if "ngram" in kinds:
        own.append(EngineSystem(shop, "ngram", {"compressor": None, "options": {}, "proposer": "ngram"}))
    for name, variant in (("", "default"), ("-offloaded", "offloaded"), ("-lookup", "lookup")):
        if f"transformers{name}" in kinds:
            own.append(HuggingFaceSystem(shop, f"transformers{name}", variant))  # type: ignore[arg-type]
    return own
