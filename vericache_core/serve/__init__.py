"""An engine behind HTTP: the OpenAI API as far as one engine can keep its word."""

from __future__ import annotations

import importlib.util

from vericache_core.errors import MissingDependencyError


def require_http() -> None:
    """Raise ``MissingDependencyError`` unless what serves HTTP is installed."""
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(f"serving needs {package}", hint="pip install 'vericache[serve]'")
