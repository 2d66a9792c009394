"""Entry point of the plugin: one spec and the option sets that conformance should also try."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vericache_compressor_kivi.compressor import KiviCompressor
from vericache_compressor_kivi.options import KiviOptions
from vericache_core import CompressorSpec, hookimpl


@hookimpl
def vericache_compressors() -> Iterable[CompressorSpec]:
    """The one compressor of this distribution."""
    return [
        CompressorSpec(
            name="kivi",
            factory=KiviCompressor,
            options=KiviOptions,
            kind="quantization",
            api_version=1,
            summary="2- or 4-bit codes: keys per channel, values per token, newest tokens exact",
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
        {"bits": 4, "group": 16, "residual": 32},
        {"key_bits": 4, "value_bits": 2, "group": 8, "residual": 24},
        {"group": 16, "residual": 16},
    ]
