"""Compressor plugins: their descriptor, options, hooks and registry.

Names are exported lazily so that listing plugins imports neither torch nor pluggy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_core._lazy import lazy_exports

if TYPE_CHECKING:
    from vericache_core.plugins.hooks import hookimpl as hookimpl
    from vericache_core.plugins.info import PluginInfo as PluginInfo
    from vericache_core.plugins.options import Budget as Budget
    from vericache_core.plugins.options import Options as Options
    from vericache_core.plugins.options import kept_tokens as kept_tokens
    from vericache_core.plugins.options import option as option
    from vericache_core.plugins.options import options_to_json as options_to_json
    from vericache_core.plugins.options import parse_options as parse_options
    from vericache_core.plugins.registry import Registry as Registry
    from vericache_core.plugins.registry import default_registry as default_registry
    from vericache_core.plugins.registry import set_default_registry as set_default_registry
    from vericache_core.plugins.schema import options_schema as options_schema
    from vericache_core.plugins.spec import API_VERSION as API_VERSION
    from vericache_core.plugins.spec import CAPABILITIES as CAPABILITIES
    from vericache_core.plugins.spec import SUPPORTED_API_VERSIONS as SUPPORTED_API_VERSIONS
    from vericache_core.plugins.spec import CompressorSpec as CompressorSpec

_HOMES = {
    "vericache_core.plugins.hooks": ["hookimpl"],
    "vericache_core.plugins.info": ["PluginInfo"],
    "vericache_core.plugins.options": [
        "Budget",
        "Options",
        "kept_tokens",
        "option",
        "options_to_json",
        "parse_options",
    ],
    "vericache_core.plugins.registry": ["Registry", "default_registry", "set_default_registry"],
    "vericache_core.plugins.schema": ["options_schema"],
    "vericache_core.plugins.spec": ["API_VERSION", "CAPABILITIES", "SUPPORTED_API_VERSIONS", "CompressorSpec"],
}

__getattr__, __dir__, __all__ = lazy_exports(__name__, _HOMES)
