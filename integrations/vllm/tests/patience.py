"""How tests wait: until something is so, with a limit that only a hang reaches, however busy the machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from vericache_vllm.home import CHUNK_SIZE
from vericache_vllm.verdict import Check, Verifier

SECONDS = 600.0
"""Limit of one wait. On an idle machine all of them end within seconds; a child that dies ends its wait at once."""


def until(fact: Callable[[], bool]) -> None:
    """Wait until ``fact`` says True; counts rounds, since a machine that pauses for minutes has asked nothing."""
    for _ in range(int(SECONDS * 10)):
        if fact():
            return
        time.sleep(0.1)
    pytest.fail(f"not so after {SECONDS:g} s")


def until_served(verifier: Verifier, prompts: Sequence[Sequence[int]]) -> None:
    """Wait until LMCache, which stores in the background, serves each whole chunk before the last token of each prompt.

    Whether it serves more, as it must not, is for tests to say.
    """
    for prompt in prompts:
        until(partial(_is_served, verifier, prompt))


def _is_served(verifier: Verifier, prompt: Sequence[int]) -> bool:
    return verifier.verify([Check(prompt)])[0].cached >= (len(prompt) - 1) // CHUNK_SIZE * CHUNK_SIZE
