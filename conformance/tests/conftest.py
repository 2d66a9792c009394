"""Shared by the tests of the suite."""

from __future__ import annotations

import pytest

from vericache_conform.execute import Settings, execute
from vericache_conform.outcome import Result


@pytest.fixture
def settings() -> Settings:
    return Settings()


@pytest.fixture(scope="session")
def passing() -> Result:
    """A result of a real check on a healthy compressor."""
    from vericache_conform.catalogue import find_check
    from vericache_conform.subject import resolve

    return execute(find_check("C-17"), resolve("mutant:healthy-drop"), Settings())
