"""kvpress for VeriCache: the presses of NVIDIA's kvpress choose tokens, VeriCache keeps the full cache.

kvpress is imported when a compressor is built, never before.
"""

from vericache_compressor_kvpress.compressor import KvpressCompressor as KvpressCompressor
from vericache_compressor_kvpress.options import KvpressOptions as KvpressOptions
from vericache_compressor_kvpress.table import PRESSES as PRESSES
