"""Entry point of the plugin: one spec and the option sets that conformance should also try."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vericache_compressor_kvzip.compressor import KVzipCompressor
from vericache_compressor_kvzip.options import KVzipOptions
from vericache_core import CompressorSpec, hookimpl


@hookimpl
def vericache_compressors() -> Iterable[CompressorSpec]:
    """The one compressor of this distribution."""
    return [
        CompressorSpec(
            name="kvzip",
            factory=KVzipCompressor,
            options=KVzipOptions,
            kind="token-drop",
            api_version=1,
            summary="keeps the tokens that the model needs to repeat its context",
            capabilities={
                "sliding_window": "no",
                "ragged_heads": "yes",
                "extend": "yes",
                "rollback": "yes",
                "residual": "yes",
                "partial_rotary": "yes",
                "nonfinite_input": "yes",
            },
        )
    ]


@hookimpl
def vericache_conformance_options() -> Iterable[Mapping[str, Any]]:
    """Option sets that take other paths through the code than the defaults."""
    return [{"level": "uniform"}, {"chunk": 50, "sinks": 0, "keep": 0.5}]
