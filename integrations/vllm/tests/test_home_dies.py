"""LMCache dies in the middle of verifications: what it held is computed again, and nothing changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tiny
from patience import kv_home, until_served
from vllm import SamplingParams

from vericache_vllm.drafter import CompressedDrafter
from vericache_vllm.generate import generate
from vericache_vllm.home import CHUNK_SIZE
from vericache_vllm.offline import OfflineVerifier, build_llm
from vericache_vllm.verdict import Check, Verdict

SECONDS = 10.0
"""Longest wait for LMCache, here for one that is gone. On a busy machine it may be passed by earlier, which changes nothing."""
NEW_TOKENS = 64
PROMPTS = [tiny.prompt(200, seed=1), tiny.prompt(4 * CHUNK_SIZE, seed=2)]


def test_the_home_dies_in_the_middle(model: Path, redis: str | None, folder: Path) -> None:
    home = kv_home(redis, folder)
    llm = build_llm(
        str(model),
        home.address,
        SECONDS,
        block_size=CHUNK_SIZE,
        enforce_eager=True,
        max_model_len=512,
        dtype="float32",
        max_num_seqs=4,
    )
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    plain = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    reference = [list(output.outputs[0].token_ids) for output in plain]
    drafter = CompressedDrafter.from_pretrained(str(model), "kivi", options={"bits": 4, "residual": 32})
    verifier, asked = OfflineVerifier(llm), []
    until_served(verifier, PROMPTS)

    class Dying:
        max_model_len = verifier.max_model_len

        def verify(self, checks: Sequence[Check]) -> list[Verdict]:
            asked.append(len(checks))
            if len(asked) == 4:
                home.close()
            return verifier.verify(checks)

    outputs = generate(PROMPTS, NEW_TOKENS, Dying(), drafter, window=6)
    drafter.engine.close()
    assert len(asked) > 4
    assert [output.token_ids for output in outputs] == reference
    verifier.close()
