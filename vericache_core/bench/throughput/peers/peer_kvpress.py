"""kvpress: SnapKV at a quarter of the tokens, then greedy decoding with the compressed cache alone, which is lossy.

One request at a time: its presses take no padded batch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import time
from collections.abc import Sequence
from typing import Any

KEEP = 0.25


class Peer:
    """Loads the model with transformers and prunes its cache with a press."""

    def __init__(self, model: str, dtype: str, threads: int, **_: Any) -> None:
        self._torch = importlib.import_module("torch")
        self._torch.set_num_threads(threads)
        self._transformers = importlib.import_module("transformers")
        kvpress = importlib.import_module("kvpress")
        self._press = kvpress.SnapKVPress(compression_ratio=1.0 - KEEP)
        load = self._transformers.AutoModelForCausalLM.from_pretrained
        self._model = load(model, dtype=getattr(self._torch, dtype), attn_implementation="sdpa").eval()
        # Newer releases of transformers have another name for it.
        self._cache_name = "cache" if "cache" in inspect.signature(self._model.forward).parameters else "past_key_values"
        self.about = {name: importlib.metadata.version(name) for name in ("kvpress", "transformers", "torch")}

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> dict[str, Any]:
        """Prefill under the press, then decode token by token."""
        tokens, prefill, decode, held = [], 0.0, 0.0, 0
        with self._torch.inference_mode():
            for prompt in prompts:
                cache = self._transformers.DynamicCache()
                ids = self._torch.tensor([list(prompt)])
                started = time.perf_counter()
                with self._press(self._model):
                    logits = self._model(input_ids=ids, use_cache=True, logits_to_keep=1, **{self._cache_name: cache}).logits
                made = [int(logits[0, -1].argmax())]
                middle = time.perf_counter()
                for position in range(len(prompt), len(prompt) + new_tokens - 1):
                    logits = self._model(
                        input_ids=self._torch.tensor([[made[-1]]]),
                        position_ids=self._torch.tensor([[position]]),
                        use_cache=True,
                        **{self._cache_name: cache},
                    ).logits
                    made.append(int(logits[0, -1].argmax()))
                prefill, decode = prefill + middle - started, decode + time.perf_counter() - middle
                tokens.append(made)
                held = max(held, sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values)))
        return {
            "tokens": tokens,
            "decoded": sum(len(one) - 1 for one in tokens),
            "decode_seconds": decode,
            "prefill_seconds": prefill,
            "peak_device_kv_bytes": held,
            "notes": [f"lossy: SnapKV keep {KEEP}, no verify; one request at a time"],
        }
