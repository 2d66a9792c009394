"""kvpress: greedy decoding with the cache that its SnapKV press leaves, which is lossy; or without a press, full KV.

One request at a time: its presses take no padded batch.
"""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import inspect
import time
from collections.abc import Sequence
from typing import Any

CHUNK = 512
"""Prompt tokens in a forward of the prefill without a press; a press scores the whole prompt in one."""


class Peer:
    """Loads the model with transformers.

    Args:
        keep: fraction of tokens that the press keeps; ``None`` for no press.
    """

    def __init__(self, model: str, dtype: str, threads: int, keep: float | None, **_: Any) -> None:
        self._torch = importlib.import_module("torch")
        self._torch.set_num_threads(threads)
        self._transformers = importlib.import_module("transformers")
        kvpress = importlib.import_module("kvpress")
        self._press = None if keep is None else kvpress.SnapKVPress(compression_ratio=1.0 - keep)
        self._note = "full KV, no press" if keep is None else f"lossy: SnapKVPress keep {keep:g}, no verify"
        load = self._transformers.AutoModelForCausalLM.from_pretrained
        self._model = load(model, dtype=getattr(self._torch, dtype), attn_implementation="sdpa").eval()
        # Newer releases of transformers have another name for it.
        self._cache_name = "cache" if "cache" in inspect.signature(self._model.forward).parameters else "past_key_values"
        self._prefilled: dict[tuple[int, ...], tuple[Any, int, float]] = {}
        self.about = {name: importlib.metadata.version(name) for name in ("kvpress", "transformers", "torch")}

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> dict[str, Any]:
        """Prefill what has not been in an earlier run, then decode token by token."""
        wanted = [tuple(prompt) for prompt in prompts]
        for ids in set(self._prefilled) - set(wanted):
            del self._prefilled[ids]
        tokens, prefill, decode, held = [], 0.0, 0.0, 0
        with self._torch.inference_mode():
            for ids in wanted:
                if ids not in self._prefilled:
                    self._prefilled[ids] = self._prefill(ids)
                kept, first, seconds = self._prefilled[ids]
                cache, made = copy.deepcopy(kept), [first]
                started = time.perf_counter()
                for position in range(len(ids), len(ids) + new_tokens - 1):
                    made.append(self._forward([made[-1]], position, cache))
                decode, prefill = decode + time.perf_counter() - started, prefill + seconds
                tokens.append(made)
                held = max(held, sum(part.nbytes for layer in cache.layers for part in (layer.keys, layer.values)))
        return {
            "tokens": tokens,
            "decoded": sum(len(one) - 1 for one in tokens),
            "decode_seconds": decode,
            "prefill_seconds": prefill,
            "steps": sum(len(one) - 1 for one in tokens),
            "peak_device_kv_bytes": held,
            "notes": [f"{self._note}; one request at a time"],
        }

    def _prefill(self, ids: tuple[int, ...]) -> tuple[Any, int, float]:
        """``(cache, first token, seconds)``."""
        cache, made = self._transformers.DynamicCache(), -1
        started = time.perf_counter()
        if self._press is None:
            for first in range(0, len(ids), CHUNK):
                made = self._forward(ids[first : first + CHUNK], first, cache)
        else:
            with self._press(self._model):
                made = self._forward(ids, 0, cache)
        return cache, made, time.perf_counter() - started

    def _forward(self, ids: Sequence[int], position: int, cache: Any) -> int:
        """Best token after ``ids``, the first of which stands at ``position``."""
        logits = self._model(
            input_ids=self._torch.tensor([list(ids)]),
            position_ids=self._torch.arange(position, position + len(ids))[None],
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_name: cache},
        ).logits
        return int(logits[0, -1].argmax())
