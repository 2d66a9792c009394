"""A stock vLLM engine decides; the full KV lives in LMCache with Redis behind it; our compressors draft."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import patience
import pytest
import tiny
from patience import kv_home, until, until_served
from stock import SETTINGS, greedy, stock_tokens
from vllm import LLM, SamplingParams

from vericache_vllm import offline
from vericache_vllm.drafter import CompressedDrafter
from vericache_vllm.generate import Generated, generate
from vericache_vllm.home import CHUNK_SIZE, KVHome
from vericache_vllm.offline import OfflineVerifier, build_llm, covered, verification_params
from vericache_vllm.verdict import Check

NEW_TOKENS = 64
# The second prompt ends on a chunk: its first verification already stands on the boundary.
PROMPTS = [tiny.prompt(200, seed=1), tiny.prompt(4 * CHUNK_SIZE, seed=2)]
DRAFTERS = [
    ("uniform", {"bits": 8}),
    ("uniform", {"bits": 4}),
    ("uniform", {"bits": 2}),
    ("kivi", {"bits": 4, "residual": 32}),
    ("kivi", {"bits": 2, "residual": 32}),
    ("turboquant", {"bits": 4}),
    ("snapkv", {"keep": 0.5}),
]


@pytest.fixture(scope="module")
def home(redis: str | None, folder: Path) -> Iterator[KVHome]:
    home = kv_home(redis, folder)
    yield home
    home.close()


@pytest.fixture(scope="module")
def reference(model: Path) -> list[list[int]]:
    """vLLM's own greedy output, of an engine that knows nothing of LMCache or of us."""
    return stock_tokens(model, PROMPTS, NEW_TOKENS)


@pytest.fixture(scope="module")
def llm(model: Path, home: KVHome, reference: list[list[int]]) -> Iterator[LLM]:
    """The verifier's engine, after the other one has ended."""
    llm = build_llm(str(model), home.address, patience.SECONDS, **SETTINGS)
    yield llm
    OfflineVerifier(llm).close()


def run(llm: LLM, model: Path, compressor: str, options: dict[str, Any], salt: str | None = None) -> list[Generated]:
    drafter = CompressedDrafter.from_pretrained(str(model), compressor, options=options, fold=16)
    try:
        return generate(PROMPTS, NEW_TOKENS, OfflineVerifier(llm, salt), drafter, window=6)
    finally:
        drafter.engine.close()


def test_the_reference_is_no_loop(reference: list[list[int]]) -> None:
    assert min(len(set(tokens)) for tokens in reference) > 16


def test_plain_decoding_by_verifications(llm: LLM, reference: list[list[int]]) -> None:
    outputs = generate(PROMPTS, 8, OfflineVerifier(llm))
    assert [output.token_ids for output in outputs] == [tokens[:8] for tokens in reference]
    assert all(output.rounds == 0 for output in outputs)


def test_requests_that_verify_nothing_are_served_as_ever(llm: LLM, reference: list[list[int]]) -> None:
    assert [greedy(llm, PROMPTS, NEW_TOKENS) for _ in range(2)] == [reference, reference]


@pytest.mark.parametrize(("compressor", "options"), DRAFTERS, ids=[f"{name}-{options}" for name, options in DRAFTERS])
def test_drafts_leave_the_tokens_as_they_are(
    llm: LLM, model: Path, reference: list[list[int]], figure: list[str], compressor: str, options: dict[str, Any]
) -> None:
    until_served(OfflineVerifier(llm), PROMPTS)
    outputs = run(llm, model, compressor, options)
    assert [output.token_ids for output in outputs] == reference
    assert all(output.degraded is None for output in outputs)
    assert all(output.reruns == 0 for output in outputs), "the connector let a verification be served too far"
    cached, prompted = (sum(getattr(output, name) for output in outputs) for name in ("cached", "prompted"))
    rounds, accepted = (sum(getattr(output, name) for output in outputs) for name in ("rounds", "accepted"))
    assert cached > prompted / 2
    figure.append(
        f"{compressor} {options}: identical; {rounds} rounds, mean accepted run {accepted / rounds:.2f} of 6, "
        f"external hits {cached} of {prompted} tokens, least margin {min(output.margin for output in outputs):.2g} nats"
    )


def test_better_drafts_take_fewer_rounds(llm: LLM, model: Path, reference: list[list[int]]) -> None:
    rounds = [sum(output.rounds for output in run(llm, model, "uniform", {"bits": bits})) for bits in (8, 4, 2)]
    assert rounds == sorted(rounds)
    assert rounds[0] < rounds[-1] / 2


def test_verified_lengths_on_chunk_multiples(llm: LLM, home: KVHome, reference: list[list[int]], figure: list[str]) -> None:
    """The store holds chunks beyond the last verified token, and no verification is served by them."""
    tokens = [*PROMPTS[1], *reference[1]]
    verifier = OfflineVerifier(llm)
    whole = Check(tokens[: 5 * CHUNK_SIZE + 8])
    verifier.verify([whole])
    cached = []
    until(lambda: verifier.verify([whole])[0].cached >= 5 * CHUNK_SIZE)
    for verified in (3 * CHUNK_SIZE, 4 * CHUNK_SIZE, 5 * CHUNK_SIZE, 4 * CHUNK_SIZE + 1, 4 * CHUNK_SIZE - 1):
        for wrong in (0, 3, None):
            drafts = tokens[verified : verified + 6]
            if wrong is not None:
                drafts[wrong] = (drafts[wrong] + 7) % tiny.VOCAB
            if verified < 4 * CHUNK_SIZE:  # inside the prompt, where the model's own choice is not the next token
                expected = verifier.verify([Check(tokens[:verified])])[0].token
                assert expected is not None
                drafts = [expected, *drafts[1:]]
                verdict = verifier.verify([Check(tokens[:verified], drafts)])[0]
                assert verdict.accepted >= 1
            else:
                verdict = verifier.verify([Check(tokens[:verified], drafts)])[0]
                assert verdict.accepted == (6 if wrong is None else wrong)
                assert verdict.token == tokens[verified + verdict.accepted]
            assert verdict.cached == (verified - 1) // CHUNK_SIZE * CHUNK_SIZE
            assert verdict.reruns == 0
            cached.append(verdict.cached)
    figure.append(f"verified lengths on and around chunk multiples: served {sorted(set(cached))} tokens, no rerun")


def test_the_client_finds_out_when_a_cache_serves_too_much(
    llm: LLM, reference: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the connector's cut the hazard is real, and the second guard takes over."""
    tokens = [*PROMPTS[1], *reference[1]]
    check = Check(tokens[: 5 * CHUNK_SIZE], tokens[5 * CHUNK_SIZE :][:6])

    def uncut(check: Check, *, use_cache: bool = True) -> SamplingParams:
        params = verification_params(check, use_cache=use_cache)
        params.extra_args = None
        return params

    stored = {"prompt_token_ids": tokens[: 6 * CHUNK_SIZE]}
    until(lambda: llm.generate([stored], uncut(Check(tokens)), use_tqdm=False)[0].num_cached_tokens >= 5 * CHUNK_SIZE)
    output = llm.generate([{"prompt_token_ids": [*check.verified, *check.drafts]}], uncut(check), use_tqdm=False)[0]
    assert covered(check, output)
    monkeypatch.setattr(offline, "verification_params", uncut)
    verdict = OfflineVerifier(llm).verify([check])[0]
    assert (verdict.reruns, verdict.cached) == (1, 0)
    assert (verdict.accepted, verdict.token) == (6, tokens[5 * CHUNK_SIZE + 6])


def test_the_full_kv_comes_back_from_redis(llm: LLM, home: KVHome, redis: str | None, reference: list[list[int]]) -> None:
    if redis is None:
        pytest.skip("redis-server is missing")
    check = Check([*PROMPTS[0], *reference[0][:4]], reference[0][4:10])
    verifier = OfflineVerifier(llm)
    until(lambda: verifier.verify([check])[0].cached == 6 * CHUNK_SIZE)
    until(lambda: home.status()["storage_manager"]["store_controllers"]["_default"]["in_flight_task_count"] == 0)
    home.forget()
    assert home.status()["storage_manager"]["l1_manager"]["total_object_count"] == 0, "something is still locked"
    verdict = verifier.verify([check])[0]
    assert verdict.cached == 6 * CHUNK_SIZE
    assert (verdict.accepted, verdict.token) == (6, reference[0][10])


def test_another_salt_sees_nothing(llm: LLM, reference: list[list[int]]) -> None:
    check = Check([*PROMPTS[0], *reference[0][:4]], reference[0][4:10])
    until(lambda: OfflineVerifier(llm).verify([check])[0].cached > 0)
    assert OfflineVerifier(llm, salt="another tenant").verify([check])[0].cached == 0


def test_a_prompt_shorter_than_a_chunk(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    prompt = tiny.prompt(5, seed=4)
    reference = list(llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0].outputs[0].token_ids)
    verdict = OfflineVerifier(llm).verify([Check(prompt, reference[:3])])[0]
    assert (verdict.accepted, verdict.token, verdict.cached) == (3, reference[3], 0)
    one = OfflineVerifier(llm).verify([Check(prompt[:1], prompt[1:2])])[0]
    assert one.token is not None
