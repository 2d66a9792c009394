"""Redis, LMCache and vLLM for the tests; each file of tests runs in a process of its own (see the Makefile)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import patience
import pytest
import tiny
import uniform
from patience import pytest_exception_interact  # noqa: F401 (a hook)

from vericache_core import default_registry
from vericache_vllm.processes import Service, accepts, free_port

# vLLM reads these when it is imported. Without its own processes an engine starts in seconds.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("LMCACHE_DISABLE_BANNER", "1")

default_registry().register(uniform.SPEC)

FIGURES: list[str] = []


@pytest.fixture
def figure() -> list[str]:
    """Lines for the summary."""
    return FIGURES


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if FIGURES:
        terminalreporter.section("figures")
        for line in FIGURES:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scaleout")


@pytest.fixture(scope="session")
def model(folder: Path) -> Path:
    return tiny.save_model(folder / "model")


@pytest.fixture(scope="session")
def redis(folder: Path) -> Iterator[str | None]:
    """``host:port``; ``None`` where there is no Redis: LMCache then keeps KV in its memory only, and the runner says so."""
    program = shutil.which("redis-server")
    if program is None:
        yield None
        return
    port = free_port()
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with Service(command, lambda: accepts(port), folder / "redis.log", seconds=patience.SECONDS):
        yield f"127.0.0.1:{port}"
