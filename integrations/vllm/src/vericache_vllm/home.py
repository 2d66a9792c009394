"""LMCache's server as the home of the full KV: how to start one, and a check that it keeps every bit."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from vericache_core.errors import ConfigError, RemoteError
from vericache_vllm.processes import Service, free_port

CHUNK_SIZE = 32
"""Tokens of a chunk, unless told otherwise: a multiple of vLLM's block size."""


class KVHome:
    """An LMCache server in multi-process mode, DRAM in front of Redis.

    Args:
        redis: ``host:port`` of Redis or Valkey; ``None`` keeps KV in DRAM only.
        log: file for what it prints.
        chunk_size: tokens of a chunk, a multiple of vLLM's block size.
        memory_gb: DRAM.
        start: seconds until it has to be ready.
        seconds: longest wait for an answer of its HTTP interface.

    Attributes:
        address: ``host:port`` for vLLM.
    """

    def __init__(
        self,
        redis: str | None,
        log: Path,
        chunk_size: int = CHUNK_SIZE,
        memory_gb: int = 1,
        start: float = 120.0,
        seconds: float = 10.0,
    ) -> None:
        port, self._http, self._seconds = free_port(), free_port(), seconds
        self.address = f"127.0.0.1:{port}"
        command = [sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--http-port", str(self._http), "--supported-transfer-mode", "engine_driven"]
        command += ["--chunk-size", str(chunk_size), "--l1-size-gb", str(memory_gb), "--l1-init-size-gb", str(memory_gb)]
        # An engine that pauses for minutes would lose its registration for good, and its next load would never end.
        command += ["--eviction-policy", "LRU", "--disable-metrics", "--worker-reap-timeout-seconds", "0"]
        if redis is not None:
            host, _, redis_port = redis.rpartition(":")
            command += ["--l2-adapter", json.dumps({"type": "resp", "host": host, "port": int(redis_port), "num_workers": 2})]
        # Every rank of vLLM registers anew with a fresh server, and hashes must agree between processes.
        environment = {"LMCACHE_DISABLE_BANNER": "1", "PYTHONHASHSEED": "0"}
        self.service = Service(command, self._healthy, log, environment, start)
        require_exact(f"127.0.0.1:{self._http}", seconds)

    def status(self) -> dict[str, Any]:
        """What the server says of itself."""
        found: dict[str, Any] = fetch(f"http://127.0.0.1:{self._http}/status", seconds=self._seconds)
        return found

    def forget(self) -> None:
        """Drop everything from DRAM; what Redis holds stays."""
        fetch(f"http://127.0.0.1:{self._http}/cache/clear", method="POST", seconds=self._seconds)

    def close(self) -> None:
        """End the server; what Redis holds stays."""
        self.service.close()

    def _healthy(self) -> bool:
        try:
            fetch(f"http://127.0.0.1:{self._http}/healthcheck")
        except RemoteError:
            return False
        return True


def require_exact(http: str, seconds: float = 10.0) -> None:
    """Refuse an LMCache server that may give back other bits than it was given.

    A lossy serializer answers under the very keys of exact KV, unmarked; verifying with its rows would commit tokens that
    the full KV does not agree with.

    Args:
        http: ``host:port`` of the server's HTTP interface.
        seconds: longest wait for its answer.

    Raises:
        ConfigError: an adapter serializes; the message names it.
        RemoteError: the server does not answer.
    """
    for adapter in _adapters(fetch(f"http://{http}/config", seconds=seconds)):
        serializer = adapter.get("serde") or adapter.get("serde_config")
        if serializer:
            raise ConfigError(
                f"LMCache adapter {adapter.get('type', '?')!r} keeps KV through {serializer}",
                cause="full KV has to come back bit for bit",
                hint="leave `serde` out of --l2-adapter",
            )


def _adapters(config: Any) -> list[dict[str, Any]]:
    """Every mapping inside ``config`` that looks like an adapter."""
    if isinstance(config, list):
        return [found for item in config for found in _adapters(item)]
    if not isinstance(config, dict):
        return []
    nested = [found for value in config.values() for found in _adapters(value)]
    return [config, *nested] if "serde" in config or "serde_config" in config else nested


def fetch(url: str, method: str = "GET", seconds: float = 10.0) -> Any:
    """JSON of ``url``, ``None`` for an empty answer.

    Raises:
        RemoteError: no answer, or not JSON.
    """
    request = urllib.request.Request(url, method=method, data=b"{}" if method == "POST" else None)  # noqa: S310
    request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:  # noqa: S310
            body = answer.read()
            return json.loads(body) if body else None
    except (OSError, ValueError) as error:
        raise RemoteError(f"{url} does not answer", cause=str(error)) from error
