"""Waits that meet their limit say so in time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import patience
import pytest


def test_the_time_of_a_question_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "SECONDS", 1.0)
    asked: list[None] = []

    def fact() -> bool:
        time.sleep(0.6)
        asked.append(None)
        return False

    with pytest.raises(TimeoutError, match="not so after"):
        patience.until(fact)
    assert len(asked) <= 2


def test_what_becomes_so_ends_the_wait() -> None:
    answers = iter([False, False, True])
    patience.until(lambda: next(answers))
    assert next(answers, None) is None


def test_a_hang_ends_its_file_and_is_told(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text("def test_hang(): raise TimeoutError('not so after 7 s')\ndef test_other(): print('and another')\n")
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-p", "patience", str(file)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ended.returncode == 1, ended.stdout
    assert "TimeoutError: not so after 7 s" in ended.stdout
    assert "and another" not in ended.stdout
