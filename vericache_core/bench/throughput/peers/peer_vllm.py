"""vLLM, greedy, full KV, all requests in one batch; written for its CPU build."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import time
from collections.abc import Sequence
from typing import Any

GIB = 1 << 30


class Peer:
    """The prefix cache keeps the prompts' KV between runs, so that decoding can be timed without their prefill.

    Args:
        kv_bytes: full KV of all requests at ``max_len`` tokens; what is reserved is half as much again, and 1 GiB.
    """

    def __init__(self, model: str, dtype: str, threads: int, max_len: int, requests: int, kv_bytes: int, **_: Any) -> None:
        # Blocks that the prompts of another workload fill are free only when they are wanted: the half is for those.
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(-(-3 * kv_bytes // (2 * GIB)) + 1))
        # Its own choice of cores keeps one of them back, which on two cores is half of the machine.
        cores = sorted(os.sched_getaffinity(0))[:threads]
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
        self._vllm = importlib.import_module("vllm")
        self._engine = self._vllm.LLM(
            model=model,
            dtype=dtype,
            max_model_len=max_len,
            max_num_seqs=max(2, requests),
            enable_prefix_caching=True,
            disable_log_stats=True,
        )
        self._cold: dict[int, float] = {}
        self.about = {
            "vllm": str(self._vllm.__version__),
            "kv_gib": os.environ["VLLM_CPU_KVCACHE_SPACE"],
            "cores": os.environ["VLLM_CPU_OMP_THREADS_BIND"],
        }

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> dict[str, Any]:
        """Decode; a run for one token before it says what the first token costs with the prompts' KV there already."""
        key = hash(tuple(map(tuple, prompts)))
        if key not in self._cold:  # later on the prefix cache has these prompts
            self._cold[key], _ = self._generate(prompts, 1)
        first, _ = self._generate(prompts, 1)
        whole, outputs = self._generate(prompts, new_tokens)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        known = sum(output.num_cached_tokens or 0 for output in outputs) / sum(map(len, prompts))
        return {
            "tokens": tokens,
            "decoded": sum(len(one) - 1 for one in tokens),
            "decode_seconds": whole - first,
            "prefill_seconds": self._cold[key],
            "steps": new_tokens - 1,
            "notes": [f"decode time: a run less one for a single token; the prefix cache had {known:.0%} of the prompts"],
        }

    def _generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> tuple[float, list[Any]]:
        params = self._vllm.SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        outputs = self._engine.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params, use_tqdm=False)
        return time.perf_counter() - started, outputs
