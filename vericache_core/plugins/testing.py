"""Help for tests of plugins: registries that see only what a test gives them, and packages made of text.

No pip is involved: a package is a folder with a ``*.dist-info`` beside its module, put on ``sys.path``. It is
no pytest plugin; import what you need.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vericache_core.plugins.discovery import GROUP
from vericache_core.plugins.registry import Registry, set_default_registry
from vericache_core.plugins.spec import CompressorSpec


@contextmanager
def isolated_registry(*specs: CompressorSpec, discover: bool = False, **arguments: Any) -> Iterator[Registry]:
    """Make a fresh registry the default one for a while; installed plugins stay out unless ``discover`` is set.

    Further arguments go to `Registry`.
    """
    registry = Registry(discover=discover, **arguments)
    for spec in specs:
        registry.register(spec)
    previous = set_default_registry(registry)
    try:
        yield registry
    finally:
        set_default_registry(previous)


def write_distribution(
    folder: Path,
    name: str,
    entry_points: Mapping[str, str],
    modules: Mapping[str, str] | None = None,
    *,
    version: str = "0.1",
    summary: str = "",
) -> Path:
    """Write an importable distribution into ``folder`` and return its dist-info folder.

    ``entry_points`` maps compressor names to targets (``module`` or ``module:attribute``); ``modules`` maps
    module names to source text.
    """
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    if summary:
        metadata += f"Summary: {summary}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    lines = [f"[{GROUP}]", *(f"{key} = {target}" for key, target in entry_points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for module, source in (modules or {}).items():
        path = folder / f"{module.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return info


@contextmanager
def on_path(folder: Path) -> Iterator[None]:
    """Put ``folder`` first on ``sys.path``; afterwards take it away and forget the modules that came from it."""
    writes_bytecode = sys.dont_write_bytecode
    # Bytecode is checked by time stamp to the second: a test that mends a module would run the old one.
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.dont_write_bytecode = writes_bytecode
        sys.path.remove(str(folder))
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(str(folder)):
                del sys.modules[name]
        importlib.invalidate_caches()
