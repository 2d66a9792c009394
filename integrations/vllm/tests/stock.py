"""A vLLM engine that knows nothing of LMCache or of us: its tokens are what all others are compared with."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from vericache_vllm.home import CHUNK_SIZE

SETTINGS: dict[str, Any] = {
    "block_size": CHUNK_SIZE,
    "enforce_eager": True,
    "max_model_len": 512,
    "dtype": "float32",
    "max_num_seqs": 4,
    "enable_prefix_caching": False,
}


def stock_tokens(model: Path, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Greedy output of such an engine, which has ended before another starts: two in one process share groups of ranks."""
    llm = LLM(model=str(model), **SETTINGS)
    tokens = greedy(llm, prompts, count)
    llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return tokens


def greedy(llm: LLM, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """``count`` tokens after each of ``prompts``, by requests that verify nothing."""
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
