"""Entry points of the plugin: one spec per press. Nothing here imports kvpress."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from vericache_compressor_kvpress.compressor import KvpressCompressor
from vericache_compressor_kvpress.expected import EXPECTED
from vericache_compressor_kvpress.options import KvpressOptions
from vericache_compressor_kvpress.table import PREFIX, PRESSES
from vericache_core import CompressorSpec, hookimpl


@hookimpl
def vericache_compressors() -> Iterable[CompressorSpec]:
    """A compressor for each press that works offline."""
    return [
        CompressorSpec(
            name=PREFIX + name,
            factory=partial(KvpressCompressor, name),
            options=KvpressOptions,
            kind="token-drop",
            api_version=1,
            summary=f"{press.class_name} of kvpress: {press.summary}",
            capabilities={
                "sliding_window": "no",
                "partial_rotary": "no",
                "extend": "yes",
                "rollback": "yes",
                "residual": "yes",
                "ragged_heads": "yes",
            },
        )
        for name, press in PRESSES.items()
    ]


@hookimpl
def vericache_expected_failures(name: str) -> Mapping[str, str]:
    """Checks that ``name`` is known to fail, with reasons."""
    return EXPECTED.get(name.removeprefix(PREFIX), {})
