"""KIVI for VeriCache: 2- and 4-bit codes, keys per channel, values per token.

Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", 2024 (arXiv 2402.02750).
"""

from vericache_compressor_kivi.codecs import KeyCodec as KeyCodec
from vericache_compressor_kivi.codecs import ValueCodec as ValueCodec
from vericache_compressor_kivi.compressor import KiviCompressor as KiviCompressor
from vericache_compressor_kivi.options import KiviOptions as KiviOptions
