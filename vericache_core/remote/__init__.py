"""Shared prefixes over a slow link: compressed KV crosses it, the full KV stays and verifies."""

from __future__ import annotations

import importlib.util

from vericache_core.errors import MissingDependencyError


def require_grpc() -> None:
    """Raise ``MissingDependencyError`` unless gRPC is installed."""
    if importlib.util.find_spec("grpc") is None:
        raise MissingDependencyError("talking to a store needs grpcio", hint="pip install 'vericache[remote]'")
