"""Entry point of the plugin: one spec and the option sets that conformance should also try."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vericache_compressor_snapkv.compressor import SnapKVCompressor
from vericache_compressor_snapkv.options import SnapKVOptions
from vericache_core import CompressorSpec, hookimpl


@hookimpl
def vericache_compressors() -> Iterable[CompressorSpec]:
    """The one compressor of this distribution."""
    return [
        CompressorSpec(
            name="snapkv",
            factory=SnapKVCompressor,
            options=SnapKVOptions,
            kind="token-drop",
            api_version=1,
            summary="keeps the tokens that the end of the prompt attends to",
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
    return [
        {"pooling": "avg", "reducer": "max", "kernel": 5, "window": 64},
        {"budget": "pyramid"},
        {"adaptive": True, "reducer": "sum", "kernel": 1},
        {"budget": "pyramid", "adaptive": True, "keep": 0.1},
    ]
