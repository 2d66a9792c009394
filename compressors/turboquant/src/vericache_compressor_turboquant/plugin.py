"""Entry point of the plugin: one spec and the option sets that conformance should also try."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vericache_compressor_turboquant.compressor import TurboQuantCompressor
from vericache_compressor_turboquant.options import TurboQuantOptions
from vericache_core import CompressorSpec, hookimpl


@hookimpl
def vericache_compressors() -> Iterable[CompressorSpec]:
    """The one compressor of this distribution."""
    return [
        CompressorSpec(
            name="turboquant",
            factory=TurboQuantCompressor,
            options=TurboQuantOptions,
            kind="quantization",
            api_version=1,
            summary="1- to 4-bit codes of randomly rotated vectors; no calibration, no groups",
            capabilities={
                "sliding_window": "no",
                "ragged_heads": "no",
                "extend": "yes",
                "rollback": "yes",
                "residual": "no",
                "partial_rotary": "yes",
                "nonfinite_input": "yes",
            },
        )
    ]


@hookimpl
def vericache_conformance_options() -> Iterable[Mapping[str, Any]]:
    """Option sets that take other paths through the code than the defaults."""
    return [
        {"bits": 3},
        {"key_bits": 3, "value_bits": 4, "values": "uniform", "residual": 16},
        {"mode": "prod", "rotation": "haar"},
        {"bits": 1, "norm_correction": False, "seed": 7},
    ]
