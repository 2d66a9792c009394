"""The pytest plugin. It is imported by every pytest run of the environment, so it imports next to nothing: no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from vericache_conform.case import Case


def pytest_configure(config: pytest.Config) -> None:
    """Announce the marker that every conformance test carries."""
    config.addinivalue_line("markers", "vericache_check(id): runs the conformance check with this id")


@pytest.fixture
def vericache_case() -> Callable[..., Case]:
    """Make a :class:`vericache_conform.case.Case` for a compressor, to write tests of one's own with its helpers."""

    def make(compressor: Any, options: Mapping[str, Any] | None = None, seed: int = 0) -> Case:
        from vericache_conform.api import as_subject
        from vericache_conform.case import Case

        return Case(as_subject(compressor, options), seed=seed)

    return make
