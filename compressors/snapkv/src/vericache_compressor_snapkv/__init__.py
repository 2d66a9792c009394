"""SnapKV for VeriCache: keep what the end of the prompt looks at.

Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", 2024 (arXiv 2404.14469), section 4.
"""

from vericache_compressor_snapkv.compressor import SnapKVCompressor as SnapKVCompressor
from vericache_compressor_snapkv.options import SnapKVOptions as SnapKVOptions
