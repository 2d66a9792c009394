"""The hooks a plugin may implement. Few on purpose: each has a docstring and a test, and a test checks that.

A plugin module marks its functions with `hookimpl`::

    from vericache_core import CompressorSpec, hookimpl

    @hookimpl
    def vericache_compressors():
        return [CompressorSpec("mine", MyCompressor, MyOptions, "token-drop", api_version=1)]

A hook may leave out arguments that it does not need; a misspelt hook name is an error at load time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import pluggy

from vericache_core.plugins.spec import CompressorSpec

PROJECT: Final = "vericache"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def vericache_compressors() -> Iterable[CompressorSpec]:  # type: ignore[empty-body]  # a hookspec has no body
    """Return the compressors of this plugin, one spec per entry-point name. Required."""


@hookspec
def vericache_conformance_options(  # type: ignore[empty-body]  # a hookspec has no body
    name: str,
) -> Iterable[Mapping[str, Any]]:
    """Return further option sets of compressor ``name`` that the conformance suite must test. Optional."""


@hookspec
def vericache_expected_failures(  # type: ignore[empty-body]  # a hookspec has no body
    name: str,
) -> Mapping[str, str]:
    """Return the conformance checks that compressor ``name`` is known to fail: check id to reason. Optional."""
