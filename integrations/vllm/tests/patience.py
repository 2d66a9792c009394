"""How tests wait: until something is so, with a limit that only a hang reaches, however busy the machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from vericache_vllm.home import CHUNK_SIZE, KVHome
from vericache_vllm.verdict import Check, Verifier

SECONDS = 600.0
"""Limit of one wait. On an idle machine all of them end within seconds; a child that dies ends its wait at once.

Products wait seconds where tests wait this long. One question may take as long, so that a wait which starts one at its
limit ends after twice this, before the runner's deadline for a file (1800).
"""


def kv_home(redis: str | None, folder: Path) -> KVHome:
    """LMCache in front of ``redis``, its log in ``folder``."""
    return KVHome(redis, folder / "lmcache.log", start=SECONDS, seconds=SECONDS)


def until(fact: Callable[[], bool]) -> None:
    """Wait until ``fact`` says True; the time that it takes to say so counts.

    Raises:
        TimeoutError: it did not within ``SECONDS``.
    """
    begun = time.monotonic()
    while not fact():
        waited = time.monotonic() - begun
        if waited > SECONDS:
            raise TimeoutError(f"not so after {waited:.0f} s")
        time.sleep(0.1)


def until_served(verifier: Verifier, prompts: Sequence[Sequence[int]]) -> None:
    """Wait until LMCache, which stores in the background, serves each whole chunk before the last token of each prompt.

    Whether it serves more, as it must not, is for tests to say.
    """
    for prompt in prompts:
        until(partial(_is_served, verifier, prompt))


def _is_served(verifier: Verifier, prompt: Sequence[int]) -> bool:
    return verifier.verify([Check(prompt)])[0].cached >= (len(prompt) - 1) // CHUNK_SIZE * CHUNK_SIZE


def pytest_exception_interact(node: pytest.Item | pytest.Collector, call: pytest.CallInfo[Any]) -> None:
    """End the file after a wait that met its limit: other tests would wait as long, and the deadline would hide why."""
    if call.excinfo is not None and call.excinfo.errisinstance(TimeoutError):
        node.session.shouldfail = str(call.excinfo.value)
