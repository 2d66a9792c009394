"""llama.cpp through the functions that llama-cpp-python binds: greedy, full KV, all requests in one batch."""

from __future__ import annotations

import importlib
import importlib.metadata
import time
from collections.abc import Sequence
from typing import Any

BATCH = 512
"""Tokens in a call of ``llama_decode``, its own default."""
ALIGN = 256
"""Tokens of context are allotted in multiples of this."""


class Peer:
    """The weights are those of the GGUF file that it is given; KV is float16, its own default."""

    def __init__(self, gguf: str | None, threads: int, max_len: int, requests: int, **_: Any) -> None:
        if gguf is None:
            raise ValueError("llama.cpp reads GGUF files, and this model is none")
        self._library = library = importlib.import_module("llama_cpp")
        self._numpy = importlib.import_module("numpy")
        library.llama_backend_init()
        model = library.llama_model_load_from_file(gguf.encode(), library.llama_model_default_params())
        if not model:
            raise ValueError(f"llama.cpp cannot load {gguf}")
        options = library.llama_context_default_params()
        options.n_ctx, options.n_seq_max, options.kv_unified = -(-max_len // ALIGN) * ALIGN * requests, requests, False
        options.n_batch = options.n_ubatch = BATCH
        options.n_threads = options.n_threads_batch = threads
        self._context = library.llama_init_from_model(model, options)
        if not self._context:
            raise ValueError("llama.cpp makes no context of that size")
        self._vocab = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))
        self._batch = library.llama_batch_init(BATCH, 0, 1)
        self._known: list[list[int]] = []
        self._prefill_seconds = 0.0
        self.about = {"llama-cpp-python": importlib.metadata.version("llama-cpp-python")}

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> dict[str, Any]:
        """Evaluate the prompts but for their last tokens, unless an earlier run has; then decode all of them at once."""
        wanted = [list(prompt) for prompt in prompts]
        memory = self._library.llama_get_memory(self._context)
        if wanted != self._known:
            self._library.llama_memory_clear(memory, True)
            self._known, self._prefill_seconds = wanted, self._prefill(wanted)
        for sequence, prompt in enumerate(wanted):
            self._library.llama_memory_seq_rm(memory, sequence, len(prompt) - 1, -1)
        newest, made = [prompt[-1] for prompt in wanted], [list[int]() for _ in wanted]
        started = time.perf_counter()
        for step in range(new_tokens):
            rows = [(token, len(wanted[at]) - 1 + step, at, True) for at, token in enumerate(newest)]
            self._feed(rows)
            newest = [self._best(row) for row in range(len(rows))]
            for one, token in zip(made, newest, strict=True):
                one.append(token)
        return {
            "tokens": made,
            "decoded": sum(map(len, made)),
            "decode_seconds": time.perf_counter() - started,
            "prefill_seconds": self._prefill_seconds,
            "steps": new_tokens,
            "notes": ["KV is float16"],
        }

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> float:
        """Seconds it took."""
        started = time.perf_counter()
        for sequence, prompt in enumerate(prompts):
            for first in range(0, len(prompt) - 1, BATCH):
                part = prompt[first : min(first + BATCH, len(prompt) - 1)]
                self._feed([(token, first + at, sequence, False) for at, token in enumerate(part)])
        return time.perf_counter() - started

    def _feed(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """One call with ``(token, position, sequence, logits wanted)`` rows."""
        batch = self._batch
        for at, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[at], batch.pos[at], batch.logits[at] = token, position, wanted
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
        batch.n_tokens = len(rows)
        status = self._library.llama_decode(self._context, batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status}")

    def _best(self, row: int) -> int:
        logits = self._library.llama_get_logits_ith(self._context, row)
        return int(self._numpy.ctypeslib.as_array(logits, (self._vocab,)).argmax())
