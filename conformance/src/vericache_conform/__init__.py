"""The conformance suite for VeriCache compressors; see ``vericache-conform --help``.

Importing this package is cheap: each public name comes from its home module when it is first touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vericache_conform._version import __version__ as __version__
from vericache_core._lazy import lazy_exports

if TYPE_CHECKING:
    from vericache_conform.api import check_compressor as check_compressor
    from vericache_conform.outcome import Result as Result
    from vericache_conform.pytest_door import CompressorConformance as CompressorConformance
    from vericache_conform.pytest_door import parametrize_with_checks as parametrize_with_checks
    from vericache_conform.report.model import Report as Report

_HOMES = {
    "vericache_conform.api": ["check_compressor"],
    "vericache_conform.outcome": ["Result"],
    "vericache_conform.pytest_door": ["CompressorConformance", "parametrize_with_checks"],
    "vericache_conform.report.model": ["Report"],
}

__getattr__, __dir__, __all__ = lazy_exports(__name__, _HOMES)
