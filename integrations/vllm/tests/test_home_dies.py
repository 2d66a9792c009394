"""LMCache dies in the middle of verifications: what it held is computed again, and nothing changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tiny
from patience import kv_home, until, until_served
from stock import SETTINGS, stock_tokens

from vericache_vllm.drafter import CompressedDrafter
from vericache_vllm.generate import generate
from vericache_vllm.home import CHUNK_SIZE
from vericache_vllm.offline import OfflineVerifier, build_llm
from vericache_vllm.verdict import Check, Verdict

SECONDS = 10.0
"""Longest wait for LMCache, here for one that is gone. On a busy machine a living one may be passed by, too."""
DEATH = 3
"""Rounds of verification before it."""
NEW_TOKENS = 64
PROMPTS = [tiny.prompt(200, seed=1), tiny.prompt(4 * CHUNK_SIZE, seed=2)]


def test_the_home_dies_in_the_middle(model: Path, redis: str | None, folder: Path) -> None:
    reference = stock_tokens(model, PROMPTS, NEW_TOKENS)
    home = kv_home(redis, folder)
    verifier = OfflineVerifier(build_llm(str(model), home.address, SECONDS, **SETTINGS))
    drafter = CompressedDrafter.from_pretrained(str(model), "kivi", options={"bits": 4, "residual": 32})
    until_served(verifier, PROMPTS)
    served: list[list[int]] = []
    before: list[list[int]] = []

    class Dying:
        max_model_len, vocab_size = verifier.max_model_len, verifier.vocab_size

        def verify(self, checks: Sequence[Check]) -> list[Verdict]:
            if len(served) == DEATH:
                # These very checks are made again without it.
                until(lambda: _ask(verifier, checks, before))
                home.close()
            verdicts = verifier.verify(checks)
            served.append([verdict.cached for verdict in verdicts])
            return verdicts

    outputs = generate(PROMPTS, NEW_TOKENS, Dying(), drafter, window=6)
    drafter.engine.close()
    verifier.close()
    assert min(before[-1]) > 0
    after = served[DEATH:]
    assert len(after) > 1
    assert [max(cached) for cached in after] == [0] * len(after)
    assert [output.token_ids for output in outputs] == reference


def _ask(verifier: OfflineVerifier, checks: Sequence[Check], served: list[list[int]]) -> bool:
    """Whether LMCache serves each of ``checks``; adds how many tokens to ``served``."""
    served.append([verdict.cached for verdict in verifier.verify(checks)])
    return min(served[-1]) > 0
