"""TurboQuant for VeriCache: rotate at random, then round each coordinate to a Lloyd-Max codebook.

Zandieh et al., "TurboQuant: Online Vector Quantization with Near-optimal Distortion Rate", 2025
(arXiv 2504.19874).
"""

from vericache_compressor_turboquant.codebook import lloyd_max as lloyd_max
from vericache_compressor_turboquant.codecs import RotatedCodec as RotatedCodec
from vericache_compressor_turboquant.codecs import UniformCodec as UniformCodec
from vericache_compressor_turboquant.compressor import TurboQuantCompressor as TurboQuantCompressor
from vericache_compressor_turboquant.options import TurboQuantOptions as TurboQuantOptions
