"""The programs of the peers, on stand-ins for the libraries that they run."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.models import build, full_forward_decode, prompt
from vericache_core.bench.throughput.peers import peer_kvpress, peer_llama_cpp, peer_vllm

PROMPTS = [prompt(40, seed=1), prompt(60, seed=2)]


@pytest.fixture(autouse=True)
def versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{name} 1")


def test_vllm_is_timed_without_the_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, dict[str, Any]]] = []
    seconds = iter([9.0, 1.0, 5.0, 1.5, 4.5])  # cold, first, whole; then first, whole
    now = [0.0]

    class LLM:
        def __init__(self, **options: Any) -> None:
            self.options = options

        def generate(self, prompts: Sequence[Any], params: Any, use_tqdm: bool) -> list[Any]:
            calls.append((params.max_tokens, prompts[0]))
            now[0] += next(seconds)
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=range(params.max_tokens))]) for _ in range(len(prompts))]

    fake = SimpleNamespace(LLM=LLM, SamplingParams=SimpleNamespace, __version__="1")
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    peer = peer_vllm.Peer(model="m", dtype="bfloat16", threads=2, max_len=100, requests=2, gguf=None)
    bound = os.environ.pop("VLLM_CPU_OMP_THREADS_BIND")
    assert (os.environ["VLLM_CPU_KVCACHE_SPACE"], bound) == ("7", "0-1")
    first, second = peer.run(PROMPTS, 8), peer.run(PROMPTS, 8)
    assert (first["decode_seconds"], first["prefill_seconds"]) == (4.0, 9.0)
    assert (second["decode_seconds"], second["prefill_seconds"]) == (3.0, 9.0)
    assert first["decoded"] == 2 * 7
    assert first["tokens"] == [list(range(8))] * 2
    assert [count for count, _ in calls] == [1, 1, 8, 1, 8]
    assert calls[0][1] == {"prompt_token_ids": PROMPTS[0]}


def test_kvpress_decodes_with_what_the_press_leaves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded = build("llama")
    loaded.save_pretrained(tmp_path)
    pressed: list[Any] = []

    def press(compression_ratio: float) -> Any:
        @contextlib.contextmanager
        def nothing(model: Any) -> Any:
            pressed.append(compression_ratio)
            yield

        return nothing

    monkeypatch.setitem(sys.modules, "kvpress", SimpleNamespace(SnapKVPress=press))
    peer = peer_kvpress.Peer(model=str(tmp_path), dtype="float32", threads=1)
    found = peer.run(PROMPTS, 9)
    assert found["tokens"] == [full_forward_decode(loaded, ids, 9)[0] for ids in PROMPTS]
    assert pressed == [0.75, 0.75]
    assert found["decoded"] == 2 * 8
    assert min(found["decode_seconds"], found["prefill_seconds"]) > 0
    per_token = 3 * 2 * 2 * 16 * 4  # layers, keys and values, KV heads, head_dim, bytes
    assert found["peak_device_kv_bytes"] == (60 + 8) * per_token


def test_llama_cpp_evaluates_each_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[list[int]] = []

    class Llama:
        def __init__(self, **options: Any) -> None:
            self.past: list[int] = []

        def reset(self) -> None:
            fed.append([])

        def eval(self, tokens: Sequence[int]) -> None:
            fed[-1] += tokens

        def sample(self, temp: float) -> int:
            return len(fed[-1])

    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=Llama))
    with pytest.raises(ValueError, match="GGUF"):
        peer_llama_cpp.Peer(gguf=None, threads=1, max_len=100)
    found = peer_llama_cpp.Peer(gguf="x.gguf", threads=1, max_len=100, dtype="bfloat16").run(PROMPTS, 5)
    assert found["tokens"] == [[40, 41, 42, 43, 44], [60, 61, 62, 63, 64]]
    assert fed == [[*PROMPTS[0], 40, 41, 42, 43], [*PROMPTS[1], 60, 61, 62, 63]]
    assert found["decoded"] == 2 * 4
