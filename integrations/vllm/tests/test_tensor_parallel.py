"""Two ranks: each keeps its own heads' KV in LMCache, and the tokens stay the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny

# Two ranks need processes of their own, one core each where there are two.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"{min(os.sched_getaffinity(0))}|{max(os.sched_getaffinity(0))}"
from vllm import SamplingParams

from vericache_vllm.drafter import CompressedDrafter
from vericache_vllm.generate import generate
from vericache_vllm.home import CHUNK_SIZE, KVHome
from vericache_vllm.offline import OfflineVerifier, build_llm

NEW_TOKENS = 32
PROMPTS = [tiny.prompt(200, seed=1), tiny.prompt(4 * CHUNK_SIZE, seed=2)]


@pytest.fixture(scope="module")
def verifier(model: Path, redis: str, folder: Path) -> Iterator[OfflineVerifier]:
    home = KVHome(redis, folder / "lmcache.log")
    llm = build_llm(
        str(model),
        home.address,
        tensor_parallel_size=2,
        block_size=CHUNK_SIZE,
        enforce_eager=True,
        max_model_len=512,
        dtype="float32",
        max_num_seqs=4,
    )
    verifier = OfflineVerifier(llm)
    yield verifier
    verifier.close()
    home.close()


def test_two_ranks(verifier: OfflineVerifier, model: Path, figure: list[str]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    plain = verifier.llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    reference = [list(output.outputs[0].token_ids) for output in plain]
    drafter = CompressedDrafter.from_pretrained(str(model), "kivi", options={"bits": 4, "residual": 32}, fold=16)
    outputs = generate(PROMPTS, NEW_TOKENS, verifier, drafter, window=6)
    drafter.engine.close()
    assert [output.token_ids for output in outputs] == reference
    cached, prompted = (sum(getattr(output, name) for output in outputs) for name in ("cached", "prompted"))
    assert cached > prompted / 2
    assert all(output.reruns == 0 and output.degraded is None for output in outputs)
    runs = ", ".join(f"{output.mean_run:.2f} in {output.rounds} rounds" for output in outputs)
    figure.append(f"tensor parallel 2, kivi 4 bit: identical; mean accepted runs {runs}; external hits {cached} of {prompted}")
