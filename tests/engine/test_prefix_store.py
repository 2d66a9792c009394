"""Engines over a prefix store: warm or cold, whole or broken, every token, logit, row and draft is the same."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.drafters import AntiOracle, drafting
from tests.engine.faulty import failing_disk
from tests.models import VOCAB, build, engine, engine_over, model, prompt
from tests.watch import Rows, assert_same, same_rows, watching
from vericache_core.compressor import TokenDropCompressor
from vericache_core.config import EngineConfig
from vericache_core.context import CompressContext, Needs
from vericache_core.engine import Engine
from vericache_core.errors import ConfigError
from vericache_core.kv import CompressedKV, LayerDescriptor, PrefixView
from vericache_core.outputs import RequestOutput
from vericache_core.plugins.options import Budget
from vericache_core.plugins.spec import CompressorSpec
from vericache_core.runtime import reuse
from vericache_core.runtime.sampling_params import SamplingParams
from vericache_core.stores import saver
from vericache_core.stores.chunks import usable
from vericache_core.stores.disk import DiskBlobs
from vericache_core.stores.saver import BackgroundSaver

CHUNK = 128
FEW = SamplingParams(max_new_tokens=6)


def url(folder: Path, more: str = "") -> str:
    return f"file://{folder}?chunk={CHUNK}&timeout=60{more}"


def run(ours: Engine, prompts: Sequence[list[int]], **settings: Any) -> tuple[list[RequestOutput], list[Rows]]:
    with watching(ours) as watch:
        outputs = ours.generate(list(prompts), FEW, record_logits=True, **settings)
    saved(ours)
    return outputs, watch.in_order()


def saved(ours: Engine) -> None:
    if ours.reuse is not None:
        assert ours.reuse.saver.flush(60)
        assert (ours.reuse.saver.failed, ours.reuse.saver.dropped) == (0, 0)


MODELS = [
    ("llama", torch.float32),
    ("qwen3", torch.bfloat16),
    ("gpt2", torch.float32),
    ("mistral", torch.float32),
    ("gemma3", torch.bfloat16),
    ("near_tie", torch.float32),
]


@pytest.mark.parametrize(("name", "dtype"), MODELS)
def test_warm_cold_and_without_a_store_give_the_same_bits(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    vocab = 128 if name == "near_tie" else VOCAB
    prompts = [prompt(length, vocab=vocab) for length in (300, 127, 128, 129, 256, 257)]  # prefixes of one another
    settings: dict[str, Any] = {"compressor": "random", "keep": 0.5}
    expected = run(engine(name, dtype, **settings), prompts)
    for tier in ("device", "host", "disk"):
        store = url(tmp_path / tier)
        cold = engine(name, dtype, full_kv=tier, prefix_store=store, **settings)
        first = run(cold, prompts[:1])
        assert first[0][0].metrics.prefix_tokens_loaded == 0
        assert_same(first[0][0], expected[0][0])
        warm = engine(name, dtype, full_kv=tier, prefix_store=store, **settings)  # as another process would
        outputs, rows = run(warm, prompts)
        for out, theirs, ours_rows, their_rows in zip(outputs, expected[0], rows, expected[1], strict=True):
            assert_same(out, theirs)
            assert same_rows(ours_rows, their_rows)
            length, metrics = len(out.prompt_token_ids), out.metrics
            stored = length // CHUNK * CHUNK
            assert metrics.prefix_tokens_loaded == usable(warm.adapter.layers, min(stored, length - 1), CHUNK)
            assert (metrics.prefix_bytes_loaded > 0) == (stored > 0)
            assert metrics.degraded == []
        whole = outputs[4].metrics  # 256 tokens, all stored
        assert (whole.prefix_tokens_loaded, whole.prompt_tokens) == (255, 256)
        plain, _ = run(warm, prompts, compressor=None)
        for out, theirs in zip(plain, expected[0], strict=True):
            assert_same(out, theirs)
            assert out.metrics.prefix_tokens_loaded > 0 or len(out.prompt_token_ids) < CHUNK
        cold.close()
        warm.close()


class Recorded(TokenDropCompressor):
    """Keeps what its last queries look at, or what all queries did, or what is asked of extra passes; remembers its results."""

    name = "recorded"
    made: list[bytes]
    wants: Needs

    @property
    def needs(self) -> Needs:
        return self.wants

    def scores(self, prefix: PrefixView, context: CompressContext) -> dict[int, Tensor]:
        scores = {}
        for layer in prefix.layers:
            if not self.supports(layer):
                continue
            keys = prefix.keys(layer.index).float()
            if self.wants.queries:
                queries = context.queries(layer.index).float().reshape(layer.kv_heads, -1, layer.head_dim)
                scores[layer.index] = torch.einsum("hqd,hkd->hk", queries, keys)
            elif self.wants.attention_mass:
                scores[layer.index] = context.attention_mass(layer.index).view(layer.kv_heads, layer.group, -1).sum(1)
            else:
                scores[layer.index] = self._scored(prefix, context, layer, keys)
        return scores

    def _scored(self, prefix: PrefixView, context: CompressContext, layer: LayerDescriptor, keys: Tensor) -> Tensor:
        seen: list[Tensor] = []

        def look(index: int, queries: Tensor, _: Tensor) -> None:
            if index == layer.index:
                seen.append(queries.float().reshape(layer.kv_heads, -1, layer.head_dim))

        context.score(prefix.token_ids[:20], look)
        return torch.einsum("hqd,hkd->hk", torch.cat(seen, 1), keys)

    def compress(self, prefix: PrefixView, context: CompressContext) -> CompressedKV:
        compressed = super().compress(prefix, context)
        self.made.append(compressed.to_payload())
        return compressed


@pytest.mark.parametrize(
    ("name", "needs", "loaded"),
    [
        ("llama", Needs(queries=40), [256, 255, 216]),
        ("llama", Needs(queries=1), [256, 256, 255]),
        ("llama", Needs(queries=400), [0, 0, 0]),
        ("llama", Needs(attention_mass=True), [0, 0, 0]),
        ("llama", Needs(scoring=True), [256, 256, 255]),
        ("gemma3", Needs(queries=40), [256, 255, 216]),
        ("gemma3", Needs(attention_mass=True), [0, 0, 0]),
        ("gemma3", Needs(scoring=True), [256, 256, 255]),
    ],
)
def test_drafts_are_the_same_with_and_without_a_store(name: str, needs: Needs, loaded: list[int], tmp_path: Path) -> None:
    made: dict[str, list[bytes]] = {}
    results: dict[str, list[RequestOutput]] = {}
    prompts = [prompt(length) for length in (300, 295, 256)]
    for kind in ("without", "cold", "warm"):
        own: list[bytes] = []
        specific = type("Specific", (Recorded,), {"made": own, "wants": needs})
        described = CompressorSpec(
            name="recorded", factory=specific, options=Budget, kind="token-drop", api_version=1, summary="for this test"
        )
        # Compressed KV from the store would leave nothing to compress; here the compressor is to see the loaded rows.
        store = None if kind == "without" else url(tmp_path, "&compressed=no")
        ours = engine_over(model(name), specs=[described], compressor="recorded", keep=0.4, prefix_store=store)
        results[kind] = [run(ours, [one])[0][0] for one in prompts]
        made[kind] = own
        ours.close()
    assert len(made["without"]) == len(prompts)
    assert made["cold"] == made["warm"] == made["without"]
    for kind in ("cold", "warm"):
        for out, theirs in zip(results[kind], results["without"], strict=True):
            assert_same(out, theirs)
            assert out.metrics.drafted_per_round == theirs.metrics.drafted_per_round
    sizes = [out.metrics.prefix_tokens_loaded for out in results["warm"]]
    layers = engine(name).adapter.layers
    assert sizes == [usable(layers, tokens, CHUNK) for tokens in loaded]


def test_what_is_generated_is_saved_and_what_is_rejected_is_not(tmp_path: Path) -> None:
    """Every draft is wrong, and a chunk fills up while they come: its rows are those of a prefill."""
    ids = prompt(120)
    long = SamplingParams(max_new_tokens=20)
    ours = engine(full_kv="host", compressor="random", keep=0.5, prefix_store=url(tmp_path))
    (plain,) = engine().generate(ids, long, compressor=None)
    with drafting(AntiOracle({tuple(ids): plain.token_ids}, VOCAB)):
        (out,) = ours.generate(ids, long)
    assert out.token_ids == plain.token_ids
    assert out.metrics.accepted == 0
    assert out.metrics.drafted > 0
    saved(ours)
    turn = [*ids, *out.token_ids, *prompt(5, seed=3)]
    (theirs,), (their_rows,) = run(engine(), [turn], compressor=None)
    (again,), (rows,) = run(ours, [turn], compressor=None)
    assert again.metrics.prefix_tokens_loaded == CHUNK
    assert_same(again, theirs)
    assert same_rows(rows, their_rows)
    others = engine(prefix_store=url(tmp_path))
    rejected = [*ids, *((token + 1) % VOCAB for token in out.token_ids)]
    assert run(others, [rejected], compressor=None)[0][0].metrics.prefix_tokens_loaded == 0
    ours.close()
    others.close()


@pytest.mark.parametrize("compressor", [None, "random"])
def test_requests_that_share_a_step_may_load_and_compute(compressor: str | None, tmp_path: Path) -> None:
    prompts = [prompt(300), prompt(260, seed=5), prompt(200), prompt(40, seed=6), prompt(256)]
    expected, _ = run(engine(compressor="random", keep=0.5), prompts, compressor=compressor)
    ours = engine(compressor="random", keep=0.5, prefix_store=url(tmp_path), full_kv="host")
    run(ours, prompts[:1], compressor=compressor)
    for _ in range(2):
        outputs, _ = run(ours, prompts, compressor=compressor)
        for out, theirs in zip(outputs, expected, strict=True):
            assert_same(out, theirs)
    assert [out.metrics.prefix_tokens_loaded for out in outputs] == [256, 256, 128, 0, 255]
    ours.close()


def test_a_preempted_request_loads_again(tmp_path: Path) -> None:
    ids, other = prompt(300), prompt(300, seed=9)
    long = SamplingParams(max_new_tokens=20)
    (expected,) = engine().generate(ids, long, compressor=None, record_logits=True)
    ours = engine(max_running=1, prefix_store=url(tmp_path))
    low = ours.submit(ids, long, compressor=None, record_logits=True)
    while len(low.token_ids) < 5:
        ours.step()
    saved(ours)
    high = ours.submit(other, long, compressor=None, priority=5)
    assert high.result().error is None
    result = low.result()
    assert result.metrics.preemptions == 1
    assert result.metrics.prefix_tokens_loaded == 256
    assert_same(result, expected)
    ours.close()


def damage(folder: Path, how: str) -> int:
    """Spoil every full blob of a store; returns how many."""
    draw = random.Random(3)
    files = sorted(file for file in (folder / "blobs").iterdir() if file.name.startswith("full-"))
    datas = [file.read_bytes() for file in files]
    for number, (file, data) in enumerate(zip(files, datas, strict=True)):
        spoiled = bytearray(data)
        if how == "payload bit":
            spoiled[draw.randrange(len(data) // 2, len(data) - 16)] ^= 1 << draw.randrange(8)
        elif how == "header bit":
            spoiled[draw.randrange(44, 500)] ^= 1 << draw.randrange(8)
        elif how == "truncated":
            spoiled = spoiled[: len(data) // 2]
        elif how == "swapped":
            spoiled = bytearray(datas[(number + 1) % len(datas)])
        elif how == "empty":
            spoiled = bytearray()
        file.write_bytes(spoiled)
    return len(files)


@pytest.mark.fault("flip", "a store under an engine")
@pytest.mark.parametrize("how", ["payload bit", "header bit", "truncated", "swapped", "empty"])
def test_a_damaged_store_costs_the_prefix_and_heals(how: str, tmp_path: Path) -> None:
    ids = prompt(300)
    (expected,), _ = run(engine(compressor="random", keep=0.5), [ids])
    ours = engine(compressor="random", keep=0.5, full_kv="host", prefix_store=url(tmp_path))
    run(ours, [ids])
    assert damage(tmp_path, how) == 2
    loaded = []
    for _ in range(4):
        (out,), _ = run(ours, [ids])
        assert_same(out, expected)
        loaded.append((out.metrics.prefix_tokens_loaded, len(out.metrics.degraded)))
    assert loaded[0] == (0, 1)
    assert loaded[-1] == (256, 0)
    ours.close()


@pytest.mark.fault("refused", "a tier that is filled out of a store")
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_tier_that_fails_while_it_is_filled_is_recovered_from(policy: str, tmp_path: Path) -> None:
    ids = prompt(300)
    (expected,), _ = run(engine(compressor="random", keep=0.5), [ids])
    ours = engine(
        compressor="random", keep=0.5, full_kv="disk", prefix_store=url(tmp_path), on_swap_error=policy, swap_dir=str(tmp_path)
    )
    run(ours, [ids])
    with failing_disk("ENOSPC", {2}):
        (out,) = ours.generate([ids], FEW, record_logits=True)
    if policy == "fail":
        assert out.finish_reason == "error"
    else:
        assert_same(out, expected)
        assert "recomputed" in out.metrics.degraded[0]
    (out,), _ = run(ours, [ids])
    assert_same(out, expected)
    assert out.metrics.prefix_tokens_loaded == 256
    ours.close()


@pytest.mark.fault("permission", "a file in place of the folder, under an engine")
def test_a_store_that_cannot_be_used_is_a_recorded_degradation(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"not a folder")
    ids = prompt(200)
    (expected,), _ = run(engine(), [ids], compressor=None)
    ours = engine(prefix_store=url(tmp_path / "file"))
    (out,) = ours.generate([ids], FEW, compressor=None, record_logits=True)
    assert_same(out, expected)
    assert "prefix store" in out.metrics.degraded[0]
    assert ours.reuse is not None
    assert ours.reuse.saver.flush(60)
    assert ours.reuse.saver.failed == 1
    ours.close()


@pytest.mark.fault("identity", "under an engine")
def test_another_model_tenant_or_arithmetic_loads_nothing(tmp_path: Path) -> None:
    ids, store = prompt(300), url(tmp_path)
    first = engine(prefix_store=store)
    run(first, [ids], compressor=None)
    first.close()
    others = {
        "tenant": engine(prefix_store=store, tenant="somebody else"),
        "weights": engine_over(build("llama", seed=1), prefix_store=store),
        "dtype": engine("llama", torch.bfloat16, prefix_store=store),
        "rows": engine(prefix_store=store, rows=8),
        "attention": engine(prefix_store=store, attention="reference"),
        "rotary": engine_over(build("llama", rope_parameters={"rope_type": "default", "rope_theta": 77.0}), prefix_store=store),
    }
    for name, other in others.items():
        (out,), _ = run(other, [ids], compressor=None)
        assert out.metrics.prefix_tokens_loaded == 0, name
        (out,), _ = run(other, [ids], compressor=None)
        assert out.metrics.prefix_tokens_loaded == 256, name
        other.close()


def test_a_store_needs_the_bitwise_promise_and_a_url_that_means_something() -> None:
    with pytest.raises(ConfigError, match="bitwise"):
        engine(prefix_store="shm://never", identity="token")
    with pytest.raises(ConfigError, match="unknown scheme"):
        engine(prefix_store="ftp://x")
    with pytest.raises(ConfigError, match="prefix_store: expected text"):
        EngineConfig(prefix_store="")


def test_nothing_leaks(tmp_path: Path) -> None:
    def round_trip(number: int) -> None:
        ours = engine(compressor="random", keep=0.5, full_kv="host", prefix_store=url(tmp_path, "&bytes=300kB"))
        ours.generate([prompt(260, seed=number % 3), prompt(130, seed=number)], FEW)
        ours.close()

    def held() -> tuple[int, int]:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    round_trip(0)
    before = held()
    for number in range(4):
        round_trip(number)
    assert held() == before
    assert list((tmp_path / "tmp").iterdir()) == []
    assert sum(file.stat().st_size for file in (tmp_path / "blobs").iterdir()) <= 300_000


def test_what_comes_too_fast_is_dropped_and_saved_next_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(reuse, "BackgroundSaver", lambda: BackgroundSaver(most_bytes=150_000))
    ours = engine(prefix_store=url(tmp_path))
    assert ours.reuse is not None
    background, put = ours.reuse.saver, ours.reuse.store.put

    def waiting(*args: Any, **kwargs: Any) -> None:
        gate.wait(60)
        put(*args, **kwargs)

    monkeypatch.setattr(ours.reuse.store, "put", waiting)
    ours.generate([prompt(600)], FEW, compressor=None)
    assert background.dropped > 0
    gate.set()
    assert background.flush(60)
    sizes = []
    for _ in range(5):
        (out,) = ours.generate([prompt(600)], FEW, compressor=None)
        assert background.flush(60)
        sizes.append(out.metrics.prefix_tokens_loaded)
    assert sizes == sorted(sizes)
    assert sizes[-1] == 512
    ours.close()


@pytest.mark.fault("hang", "a store under an engine")
@pytest.mark.parametrize("call", ["contains", "get", "put"])
def test_a_store_that_hangs_is_given_up_on(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that never comes back costs the deadline once; the request goes on without the store."""
    ids, never = prompt(300), threading.Event()
    (expected,), _ = run(engine(), [ids], compressor=None)
    first = engine(prefix_store=url(tmp_path))
    run(first, [ids], compressor=None)
    first.close()
    if call == "put":
        for file in (tmp_path / "blobs").iterdir():
            file.unlink()

    def hang(*_: Any, **__: Any) -> None:
        never.wait()

    monkeypatch.setattr(DiskBlobs, call, hang)
    monkeypatch.setattr(saver, "PUT_SECONDS", 0.2)
    ours = engine(prefix_store=f"file://{tmp_path}?chunk={CHUNK}&timeout=0.2")
    for _ in range(2):
        (out,) = ours.generate([ids], FEW, compressor=None, record_logits=True)
        assert_same(out, expected)
        assert out.metrics.prefix_tokens_loaded == 0
        assert (call == "put") == (out.metrics.degraded == [])
    never.set()
    ours.close()
