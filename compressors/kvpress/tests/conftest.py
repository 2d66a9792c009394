"""The adapter is installed by hand, since kvpress is; its tests run from the checkout all the same."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("vericache_compressor_kvpress") is None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
