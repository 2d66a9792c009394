"""Settings and fixtures shared by the tests of the core."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from vericache_core.plugins.registry import Registry
from vericache_core.plugins.testing import isolated_registry, on_path

# No deadline: the first tensor operation of a process is slow and says nothing about the code.
settings.register_profile("vericache", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("vericache")


@pytest.fixture
def vericache_registry() -> Iterator[Registry]:
    """The default registry, without the plugins that happen to be installed."""
    with isolated_registry() as registry:
        yield registry


@pytest.fixture
def plugin_folder(tmp_path: Path) -> Iterator[Path]:
    """An empty folder on ``sys.path`` for `write_distribution`."""
    folder = tmp_path / "site"
    folder.mkdir()
    with on_path(folder):
        yield folder
