"""The programs of the peers, on stand-ins for the libraries that they run."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.models import build, full_forward_decode, prompt
from vericache_core.bench.throughput import gguf_weights
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
            answer = SimpleNamespace(token_ids=range(params.max_tokens))
            return [SimpleNamespace(outputs=[answer], num_cached_tokens=25) for _ in range(len(prompts))]

    fake = SimpleNamespace(LLM=LLM, SamplingParams=SimpleNamespace, __version__="1")
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7, 3, 5})
    for name in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.setenv(name, "")  # so that it is gone again afterwards
        monkeypatch.delenv(name)
    peer = peer_vllm.Peer(model="m", dtype="bfloat16", threads=2, max_len=100, requests=2, kv_bytes=3 << 29)
    assert peer.about == {"vllm": "1", "kv_gib": "4", "cores": "3,5"}  # 1.5 GiB and its half, rounded up, and one more
    first, second = peer.run(PROMPTS, 8), peer.run(PROMPTS, 8)
    assert (first["decode_seconds"], first["prefill_seconds"]) == (4.0, 9.0)
    assert (second["decode_seconds"], second["prefill_seconds"]) == (3.0, 9.0)
    assert (first["decoded"], first["steps"]) == (2 * 7, 7)
    assert first["tokens"] == [list(range(8))] * 2
    assert [count for count, _ in calls] == [1, 1, 8, 1, 8]
    assert calls[0][1] == {"prompt_token_ids": PROMPTS[0]}
    assert "had 50% of the prompts" in first["notes"][0]
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    assert peer_vllm.Peer(model="m", dtype="bfloat16", threads=2, max_len=9, requests=2, kv_bytes=9).about["kv_gib"] == "7"


@pytest.mark.parametrize("keep", [0.25, None])
def test_kvpress_decodes_with_what_the_press_leaves(
    keep: float | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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
    monkeypatch.setattr(peer_kvpress, "CHUNK", 16)
    peer = peer_kvpress.Peer(model=str(tmp_path), dtype="float32", threads=1, keep=keep)
    found, again = peer.run(PROMPTS, 9), peer.run(PROMPTS, 9)
    assert found["tokens"] == again["tokens"] == [full_forward_decode(loaded, ids, 9)[0] for ids in PROMPTS]
    assert pressed == ([] if keep is None else [0.75, 0.75])  # each prompt once
    assert found["decoded"] == found["steps"] == 2 * 8
    assert min(found["decode_seconds"], found["prefill_seconds"]) > 0
    assert again["prefill_seconds"] == found["prefill_seconds"]
    per_token = 3 * 2 * 2 * 16 * 4  # layers, keys and values, KV heads, head_dim, bytes
    assert found["peak_device_kv_bytes"] == (60 + 8) * per_token
    assert len(peer.run(PROMPTS[:1], 9)["tokens"]) == 1
    assert len(peer._prefilled) == 1  # those of another workload are given back


class LlamaLibrary:
    """The functions of llama.cpp that the peer calls, over a model whose next token counts the tokens before it."""

    def __init__(self) -> None:
        self.kept: dict[int, list[int]] = {}
        self.calls: list[int] = []
        self.options: Any = None

    llama_model_default_params = llama_context_default_params = staticmethod(SimpleNamespace)
    llama_backend_init = staticmethod(lambda: None)
    llama_model_get_vocab = llama_get_memory = staticmethod(lambda thing: thing)
    llama_vocab_n_tokens = staticmethod(lambda _: 200)

    def llama_model_load_from_file(self, path: bytes, params: Any) -> int:
        return 0 if path == b"broken.gguf" else 1

    def llama_init_from_model(self, model: int, options: Any) -> int:
        self.options = options
        return 1

    def llama_batch_init(self, tokens: int, _: int, sequences: int) -> Any:
        rows = {name: [0] * tokens for name in ("token", "pos", "n_seq_id", "logits")}
        return SimpleNamespace(**rows, seq_id=[[0] for _ in range(tokens)], n_tokens=0)

    def llama_memory_clear(self, memory: int, data: bool) -> None:
        self.kept.clear()

    def llama_memory_seq_rm(self, memory: int, sequence: int, first: int, last: int) -> None:
        del self.kept[sequence][first:]

    def llama_decode(self, context: int, batch: Any) -> int:
        self.calls.append(batch.n_tokens)
        self.answers = []
        for at in range(batch.n_tokens):
            mine = self.kept.setdefault(batch.seq_id[at][0], [])
            assert batch.pos[at] == len(mine)
            mine.append(batch.token[at])
            self.answers.append(len(mine) if batch.logits[at] else None)
        return 0

    def llama_get_logits_ith(self, context: int, row: int) -> Any:
        return (ctypes.c_float * 200)(*[float(token == self.answers[row]) for token in range(200)])


def test_llama_cpp_evaluates_each_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    library = LlamaLibrary()
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    size: dict[str, Any] = {"threads": 1, "max_len": 100, "requests": 2, "kv_bytes": 1, "dtype": "bfloat16"}
    with pytest.raises(ValueError, match="this model is none"):
        peer_llama_cpp.Peer(gguf=None, **size)
    with pytest.raises(ValueError, match=r"cannot load broken\.gguf"):
        peer_llama_cpp.Peer(gguf="broken.gguf", **size)
    peer = peer_llama_cpp.Peer(gguf="x.gguf", **size)
    assert (library.options.n_ctx, library.options.n_seq_max) == (512, 2)
    monkeypatch.setattr(peer_llama_cpp, "BATCH", 32)
    for _ in range(2):
        found = peer.run(PROMPTS, 5)
        assert found["tokens"] == [[40, 41, 42, 43, 44], [60, 61, 62, 63, 64]]
        assert library.kept[1][: len(PROMPTS[1])] == PROMPTS[1]
    assert library.calls == [32, 7, 32, 27, *[2] * 5, *[2] * 5]
    assert (found["decoded"], found["steps"]) == (2 * 5, 5)


def test_widened_weights_are_those_that_the_engine_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    monkeypatch.setenv("VERICACHE_CACHE", str(tmp_path / "cache"))
    draw = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(str(tmp_path / "small.gguf"), "llama")
    writer.add_block_count(3)
    writer.add_token_list(["a", "b"])
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("wide", gguf.quants.quantize(draw, kind), raw_dtype=kind)
    writer.add_tensor("norm", draw[0])
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()
    made = gguf_weights.widened(tmp_path / "small.gguf", "bfloat16")
    assert gguf_weights.widened(tmp_path / "small.gguf", "bfloat16") == made
    assert list(made.parent.iterdir()) == [made]
    reader = gguf.GGUFReader(str(made))
    assert reader.fields["llama.block_count"].contents() == 3
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    decoded = gguf.quants.dequantize(gguf.quants.quantize(draw, kind), kind)
    bits = torch.from_numpy(decoded).to(torch.bfloat16).view(torch.int16).numpy()
    assert tensors["wide"].tensor_type.name == "BF16"
    assert np.array_equal(tensors["wide"].data.view(np.int16), bits)
    assert tensors["norm"].tensor_type.name == "F32"
    assert np.array_equal(tensors["norm"].data, draw[0])
