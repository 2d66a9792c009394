"""KVzip for VeriCache: keep what the model looks at when it repeats its context.

Kim et al., "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction", 2025 (arXiv 2505.23416).
"""

from vericache_compressor_kvzip.compressor import KVzipCompressor as KVzipCompressor
from vericache_compressor_kvzip.options import KVzipOptions as KVzipOptions
from vericache_compressor_kvzip.score_file import dump_scores as dump_scores
from vericache_compressor_kvzip.score_file import load_scores as load_scores
