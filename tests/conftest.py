"""Settings and fixtures shared by the tests of the core."""

from __future__ import annotations

import importlib.metadata
import os
import signal
from collections.abc import Iterator
from pathlib import Path

# Models of the tests are so small that threads only wait for each other; Numba reads this when it is imported.
os.environ.setdefault("NUMBA_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.fault_table import pytest_addoption, pytest_configure, tally
from vericache_core.plugins.registry import Registry
from vericache_core.plugins.testing import isolated_registry, on_path

__all__ = ["pytest_addoption", "pytest_configure", "tally"]  # the fault table: hooks and a fixture

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads this when a kernel is defined

# No deadline: the first tensor operation of a process is slow and says nothing about the code.
settings.register_profile("vericache", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("vericache")


@pytest.fixture
def vericache_registry() -> Iterator[Registry]:
    """The default registry, without the plugins that happen to be installed."""
    with isolated_registry() as registry:
        yield registry


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT means what it means in a terminal, for children too: a shell lets what it starts with ``&`` ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def plugin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder on ``sys.path`` for `write_distribution`; what is installed elsewhere is out of sight."""
    everywhere = importlib.metadata.distributions

    def here() -> Iterator[importlib.metadata.Distribution]:
        return (found for found in everywhere() if Path(str(found.locate_file(""))).is_relative_to(tmp_path))

    monkeypatch.setattr(importlib.metadata, "distributions", here)
    folder = tmp_path / "site"
    folder.mkdir()
    with on_path(folder):
        yield folder
