"""llama.cpp through llama-cpp-python, greedy, full KV, one request at a time; reads the GGUF file of the model."""

from __future__ import annotations

import importlib
import importlib.metadata
import time
from collections.abc import Sequence
from typing import Any


class Peer:
    """The weights are what the GGUF file holds, whatever dtype the others use."""

    def __init__(self, gguf: str | None, threads: int, max_len: int, **_: Any) -> None:
        if gguf is None:
            raise ValueError("llama.cpp reads GGUF files, and this model is none")
        library = importlib.import_module("llama_cpp")
        self._llama = library.Llama(
            model_path=gguf, n_ctx=max_len, n_threads=threads, n_threads_batch=threads, logits_all=False, verbose=False
        )
        self.about = {"llama-cpp-python": importlib.metadata.version("llama-cpp-python")}

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> dict[str, Any]:
        """Evaluate each prompt, then sample greedily token by token."""
        tokens, prefill, decode = [], 0.0, 0.0
        for prompt in prompts:
            self._llama.reset()
            started = time.perf_counter()
            self._llama.eval(list(prompt))
            made = [int(self._llama.sample(temp=0.0))]
            middle = time.perf_counter()
            while len(made) < new_tokens:
                self._llama.eval([made[-1]])
                made.append(int(self._llama.sample(temp=0.0)))
            prefill, decode = prefill + middle - started, decode + time.perf_counter() - middle
            tokens.append(made)
        return {
            "tokens": tokens,
            "decoded": sum(len(one) - 1 for one in tokens),
            "decode_seconds": decode,
            "prefill_seconds": prefill,
            "notes": ["one request at a time; weights as in the GGUF file"],
        }
