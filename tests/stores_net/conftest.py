from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stores_net.servers import FakeRedis, RealRedis, eventually


def handles() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """No test leaves a thread of the client or an open file or socket behind."""
    files, before = handles(), set(threading.enumerate())  # a test that failed elsewhere may have left some
    yield
    eventually(lambda: not [t for t in threading.enumerate() if t not in before and t.name.startswith("vericache-store")])
    eventually(lambda: handles() <= files)


@pytest.fixture
def fake() -> Iterator[FakeRedis]:
    pytest.importorskip("redis")
    server = FakeRedis()
    yield server
    server.close()


@pytest.fixture
def real(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RealRedis]:
    """The real server; parametrize it indirectly to give it options."""
    pytest.importorskip("redis")
    server = RealRedis(tmp_path, *getattr(request, "param", ()))
    yield server
    server.kill()
