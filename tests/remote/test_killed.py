"""The verifier dies while a question is with it: ``kill -9`` of a process that has been asked and will never answer."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from tests.remote.stores import token_file
from tests.remote.test_process import drafted, expected, folder, serving
from vericache_core.remote.frames import Message
from vericache_core.remote.session import RemoteSession

__all__ = ["folder"]  # a fixture


@pytest.mark.fault("verifier", "`kill -9` with a question before it")
@pytest.mark.slow
@pytest.mark.parametrize("point", [1, 2, 3, 5])
def test_killed_while_a_question_is_with_it(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, point: int
) -> None:
    """It is stopped just before the n-th question goes out, so that it cannot have answered, and killed half a second later."""
    right = expected(capsys, folder)
    sent, asked = RemoteSession.sent, []
    with serving(folder) as (process, address):

        def stops(self: RemoteSession, drafts: list[int]) -> Message:
            asked.append(len(drafts))
            if len(asked) == point:
                process.send_signal(signal.SIGSTOP)  # the question goes out behind this, and nobody answers it
                killer = threading.Timer(0.5, process.kill)
                killer.daemon = True
                killer.start()
            return sent(self, drafts)

        monkeypatch.setattr(RemoteSession, "sent", stops)
        link = ["--remote", address, "--remote-token-file", token_file(folder), "--remote-timeout", "5"]
        found = drafted(capsys, folder, *link)
    assert len(asked) >= point, "it was never asked so often"
    assert [output["token_ids"] for output in found["outputs"]] == right
    assert any(output["degraded"] for output in found["outputs"])
