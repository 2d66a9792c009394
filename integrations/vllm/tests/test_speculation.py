"""vLLM's own speculative decoding with lossy drafts, and a vLLM engine as the drafter of another."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from vericache_vllm.engine_drafter import EngineDrafter
from vericache_vllm.generate import generate
from vericache_vllm.offline import OfflineVerifier
from vericache_vllm.speculation import compressed_draft, dtype_draft, speculative

NEW_TOKENS = 48
WINDOW = 4
PROMPTS = [tiny.prompt(100, seed=1), [*tiny.prompt(20, seed=2), *tiny.prompt(20, seed=2)]]
SETTINGS = {"block_size": 32, "enforce_eager": True, "max_model_len": 256, "dtype": "float32", "max_num_seqs": 4}


def engine(model: Path, **further: Any) -> LLM:
    return LLM(model=str(model), disable_log_stats=False, **{**SETTINGS, "enable_prefix_caching": False, **further})


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    end_engines()


def end_engines() -> None:
    """Engines in one process share its groups of ranks: all references to one are dropped before the next begins."""
    gc.collect()
    cleanup_dist_env_and_memory()


def greedy(llm: LLM) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def speculate(model: Path, arguments: dict[str, Any]) -> tuple[list[list[int]], int, int]:
    """``(tokens, accepted drafts, drafts)`` of an engine that ends with this function."""
    llm = engine(model, **arguments)
    tokens = greedy(llm)
    counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    return tokens, int(counts["vllm:spec_decode_num_accepted_tokens"]), int(counts["vllm:spec_decode_num_draft_tokens"])


@pytest.fixture(scope="module")
def reference(model: Path) -> list[list[int]]:
    found = greedy(engine(model))
    end_engines()
    return found


def test_drafts_in_the_engine(model: Path, reference: list[list[int]], figure: list[str]) -> None:
    """The better the draft's KV, the more drafts are accepted; the tokens never change."""
    rates = {}
    for name, arguments in {
        "the same KV": speculative(method="draft_model", model=str(model), num_speculative_tokens=WINDOW),
        "turboquant 4 bit": compressed_draft(str(model), "turboquant", {"bits": 4}, WINDOW),
        "turboquant 1 bit": compressed_draft(str(model), "turboquant", {"bits": 1}, WINDOW),
        "uniform 8 bit": compressed_draft(str(model), "uniform", {"bits": 8}, WINDOW),
        "fp8 by vLLM's dtype": dtype_draft(str(model), "fp8", WINDOW),
        "n-gram": speculative(method="ngram", num_speculative_tokens=WINDOW, prompt_lookup_max=3, prompt_lookup_min=1),
    }.items():
        tokens, kept, drafted = speculate(model, arguments)
        end_engines()
        assert tokens == reference, name
        rates[name] = kept / drafted
        figure.append(f"in the engine, {name}: identical; {kept} of {drafted} drafts accepted")
    assert rates["the same KV"] == 1.0
    assert rates["turboquant 1 bit"] < rates["turboquant 4 bit"] < rates["uniform 8 bit"] <= 1.0


def test_an_engine_drafts_for_another(model: Path, reference: list[list[int]], figure: list[str]) -> None:
    """Lossy KV dtype and n-gram drafts beneath it in one engine, decided by another."""
    beneath = speculative(method="ngram", num_speculative_tokens=WINDOW, prompt_lookup_max=3, prompt_lookup_min=1)
    drafting = engine(model, kv_cache_dtype="fp8", enable_prefix_caching=True, **beneath)
    outputs = generate(PROMPTS, NEW_TOKENS, OfflineVerifier(engine(model)), EngineDrafter(drafting), window=6)
    assert [output.token_ids for output in outputs] == reference
    assert all(output.degraded is None for output in outputs)
    runs = ", ".join(f"{output.mean_run:.2f} in {output.rounds} rounds" for output in outputs)
    figure.append(f"an fp8 engine with n-gram drafts beneath, decided by another: identical; mean accepted runs {runs}")
