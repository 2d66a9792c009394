from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from vericache_core.remote.loop import RemoteLoop
from vericache_core.runtime.request import Request


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After every step of a drafter all its sessions must be sound; nothing may run on when a test has ended."""
    step = RemoteLoop.step

    def checked(self: RemoteLoop) -> list[Request]:
        finished = step(self)
        for live in self._remote.values():
            live.session.check_integrity()
        return finished

    monkeypatch.setattr(RemoteLoop, "step", checked)
    before = set(threading.enumerate())
    yield
    ours = [thread for thread in threading.enumerate() if thread not in before and "vericache" in thread.name]
    for thread in ours:
        thread.join(10)
    assert not [thread.name for thread in ours if thread.is_alive()]
