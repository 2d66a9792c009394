"""VeriCache: decode with a compressed KV cache, verify with the full one, and change no token.

``import vericache_core`` is cheap: each public name is imported from its home module when first touched, so
the command line can answer ``--help`` without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_core._lazy import lazy_exports
from vericache_core._version import __version__ as __version__

if TYPE_CHECKING:
    from vericache_core.attention.layouts import CodeLayout as CodeLayout
    from vericache_core.coded import Codec as Codec
    from vericache_core.coded import Codes as Codes
    from vericache_core.compressor import BaseCompressor as BaseCompressor
    from vericache_core.compressor import Compressor as Compressor
    from vericache_core.compressor import QuantizationCompressor as QuantizationCompressor
    from vericache_core.compressor import TokenDropCompressor as TokenDropCompressor
    from vericache_core.compressor import require_finite as require_finite
    from vericache_core.config import EngineConfig as EngineConfig
    from vericache_core.config import load_config as load_config
    from vericache_core.context import CompressContext as CompressContext
    from vericache_core.context import Needs as Needs
    from vericache_core.engine import Engine as Engine
    from vericache_core.errors import CompressorFault as CompressorFault
    from vericache_core.errors import OptionError as OptionError
    from vericache_core.errors import VeriCacheError as VeriCacheError
    from vericache_core.index_map import HeadMap as HeadMap
    from vericache_core.kv import CompressedKV as CompressedKV
    from vericache_core.kv import CompressedLayer as CompressedLayer
    from vericache_core.kv import LayerDescriptor as LayerDescriptor
    from vericache_core.kv import PrefixView as PrefixView
    from vericache_core.outputs import RequestOutput as RequestOutput
    from vericache_core.outputs import StreamChunk as StreamChunk
    from vericache_core.plugins.hooks import hookimpl as hookimpl
    from vericache_core.plugins.options import Budget as Budget
    from vericache_core.plugins.options import Options as Options
    from vericache_core.plugins.options import kept_tokens as kept_tokens
    from vericache_core.plugins.options import option as option
    from vericache_core.plugins.registry import Registry as Registry
    from vericache_core.plugins.registry import default_registry as default_registry
    from vericache_core.plugins.spec import API_VERSION as API_VERSION
    from vericache_core.plugins.spec import CompressorSpec as CompressorSpec
    from vericache_core.runtime.sampling_params import SamplingParams as SamplingParams
    from vericache_core.topk import stable_topk as stable_topk

# The same names as above: that list is for type checkers, this one for running. A test compares them.
_HOMES = {
    "vericache_core.attention.layouts": ["CodeLayout"],
    "vericache_core.coded": ["Codec", "Codes"],
    "vericache_core.compressor": [
        "BaseCompressor",
        "Compressor",
        "QuantizationCompressor",
        "TokenDropCompressor",
        "require_finite",
    ],
    "vericache_core.config": ["EngineConfig", "load_config"],
    "vericache_core.context": ["CompressContext", "Needs"],
    "vericache_core.engine": ["Engine"],
    "vericache_core.errors": ["CompressorFault", "OptionError", "VeriCacheError"],
    "vericache_core.index_map": ["HeadMap"],
    "vericache_core.kv": ["CompressedKV", "CompressedLayer", "LayerDescriptor", "PrefixView"],
    "vericache_core.outputs": ["RequestOutput", "StreamChunk"],
    "vericache_core.plugins.hooks": ["hookimpl"],
    "vericache_core.plugins.options": ["Budget", "Options", "kept_tokens", "option"],
    "vericache_core.plugins.registry": ["Registry", "default_registry"],
    "vericache_core.plugins.spec": ["API_VERSION", "CompressorSpec"],
    "vericache_core.runtime.sampling_params": ["SamplingParams"],
    "vericache_core.topk": ["stable_topk"],
}

__getattr__, __dir__, __all__ = lazy_exports(__name__, _HOMES)
