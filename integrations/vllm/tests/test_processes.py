"""Child processes that serve: one that hangs is noticed in the time that the caller gives, one that ends at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from vericache_core.errors import RemoteError
from vericache_vllm import home
from vericache_vllm.processes import Service

SLEEPER = [sys.executable, "-c", "import time; print('last words', flush=True); time.sleep(6000)"]


def test_one_that_hangs_is_noticed_and_ended(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    with pytest.raises(RemoteError, match=r"was not ready after 0\.5 s"):
        Service(SLEEPER, lambda: False, tmp_path / "log", seconds=0.5)
    assert set(psutil.Process().children()) == before


def test_one_that_ends_is_noticed_at_once(tmp_path: Path) -> None:
    with pytest.raises(RemoteError, match=r"status 3.*last words"):
        Service([sys.executable, "-c", "print('last words'); exit(3)"], lambda: False, tmp_path / "log")


def test_a_home_waits_as_long_as_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short in service, long in tests: both waits are the caller's."""
    waits: list[float] = []

    def fetch(*_: str, seconds: float, **__: str) -> dict[str, Any]:
        waits.append(seconds)
        return {}

    monkeypatch.setattr(home, "Service", lambda *arguments: waits.append(arguments[-1]))
    monkeypatch.setattr(home, "fetch", fetch)
    for server in (home.KVHome(None, tmp_path / "log"), home.KVHome(None, tmp_path / "log", start=7.0, seconds=3.0)):
        server.forget()
        server.status()
    assert waits == [120.0, 10.0, 7.0, 3.0, 10.0, 10.0, 3.0, 3.0]
