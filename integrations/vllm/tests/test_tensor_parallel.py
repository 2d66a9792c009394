"""Two ranks: each keeps its own heads' KV in LMCache, and the tokens stay the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import patience
import pytest
import tiny
from patience import kv_home, until_served

# Two ranks need processes of their own. None is bound to a core: a core that others use would hold up both.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
from stock import SETTINGS, greedy, stock_tokens

from vericache_vllm.drafter import CompressedDrafter
from vericache_vllm.generate import generate
from vericache_vllm.home import CHUNK_SIZE
from vericache_vllm.offline import OfflineVerifier, build_llm
from vericache_vllm.verdict import Check

NEW_TOKENS = 32
PROMPTS = [tiny.prompt(200, seed=1), tiny.prompt(4 * CHUNK_SIZE, seed=2)]


@pytest.fixture(scope="module")
def reference(model: Path) -> list[list[int]]:
    """What one rank says that knows nothing of LMCache or of us."""
    return stock_tokens(model, PROMPTS, NEW_TOKENS)


@pytest.fixture(scope="module")
def verifier(model: Path, redis: str | None, folder: Path, reference: list[list[int]]) -> Iterator[OfflineVerifier]:
    """The engine with two ranks, after the other one has ended."""
    home = kv_home(redis, folder)
    verifier = OfflineVerifier(build_llm(str(model), home.address, patience.SECONDS, tensor_parallel_size=2, **SETTINGS))
    yield verifier
    verifier.close()
    home.close()


def test_two_ranks_and_one_say_the_same_by_themselves(verifier: OfflineVerifier, reference: list[list[int]]) -> None:
    assert [greedy(verifier.llm, PROMPTS, NEW_TOKENS) for _ in range(2)] == [reference, reference]


def test_two_ranks(verifier: OfflineVerifier, model: Path, reference: list[list[int]], figure: list[str]) -> None:
    until_served(verifier, PROMPTS)
    drafter = CompressedDrafter.from_pretrained(str(model), "kivi", options={"bits": 4, "residual": 32}, fold=16)
    outputs = generate(PROMPTS, NEW_TOKENS, verifier, drafter, window=6)
    drafter.engine.close()
    assert [output.token_ids for output in outputs] == reference
    cached, prompted = (sum(getattr(output, name) for output in outputs) for name in ("cached", "prompted"))
    assert cached > prompted / 2
    assert all(output.reruns == 0 and output.degraded is None for output in outputs)
    runs = ", ".join(f"{output.mean_run:.2f} in {output.rounds} rounds" for output in outputs)
    figure.append(f"tensor parallel 2, kivi 4 bit: identical; mean accepted runs {runs}; external hits {cached} of {prompted}")


@pytest.mark.parametrize("beside", [-1, 0, 1])
def test_verified_lengths_on_chunk_multiples(verifier: OfflineVerifier, reference: list[list[int]], beside: int) -> None:
    """Each rank is served the same chunks, none of them at or past the last verified token."""
    tokens = [*PROMPTS[0], *reference[0]]
    until_served(verifier, [tokens])
    verified = 7 * CHUNK_SIZE + beside
    verdict = verifier.verify([Check(tokens[:verified], tokens[verified : verified + 6])])[0]
    assert verdict.cached == (verified - 1) // CHUNK_SIZE * CHUNK_SIZE
    assert (verdict.accepted, verdict.token, verdict.reruns) == (6, tokens[verified + 6], 0)
