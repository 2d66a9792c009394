"""Another vLLM engine as the drafter: lossy KV by its own dtypes, and its own n-gram or EAGLE drafts beneath them.

What it generates are drafts, whatever its settings. Its prefix cache holds the compressed KV between rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vericache_vllm.compat import require_compatible

if TYPE_CHECKING:
    from vllm import LLM


class EngineDrafter:
    """Drafts with ``llm``, such as ``LLM(model, kv_cache_dtype="fp8", enable_prefix_caching=True)``."""

    def __init__(self, llm: LLM) -> None:
        require_compatible("verifier")
        self.llm = llm

    def open(self, prompt: Sequence[int]) -> EngineSession:
        return EngineSession(self.llm, tuple(prompt))


class EngineSession:
    """Drafts for one request; the engine keeps the KV."""

    def __init__(self, llm: LLM, prompt: tuple[int, ...]) -> None:
        self._llm, self._prompt = llm, prompt

    def propose(self, committed: Sequence[int], count: int) -> list[int]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        outputs = self._llm.generate([{"prompt_token_ids": [*self._prompt, *committed]}], params, use_tqdm=False)
        return list(outputs[0].outputs[0].token_ids)

    def close(self) -> None:
        """Nothing to give back: the engine's cache forgets by itself."""
