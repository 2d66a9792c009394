"""The verifier as a server: a vLLM API server with our route, its full KV in LMCache, drafts over HTTP."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import patience
import pytest
import tiny
from patience import kv_home, until_served
from stock import stock_tokens

from vericache_core.errors import ConfigError, PromptError, RemoteError
from vericache_vllm.client import HttpVerifier
from vericache_vllm.drafter import CompressedDrafter
from vericache_vllm.generate import generate
from vericache_vllm.home import CHUNK_SIZE, fetch
from vericache_vllm.offline import kv_transfer_config
from vericache_vllm.processes import Service, accepts, free_port
from vericache_vllm.verdict import PATH, PROTOCOL, Check

TOKEN = "a token of this test"
NEW_TOKENS = 32
PROMPTS = [tiny.prompt(200, seed=1), tiny.prompt(4 * CHUNK_SIZE, seed=2)]


@pytest.fixture(scope="module")
def reference(model: Path) -> list[list[int]]:
    """Greedy output of an engine that knows nothing of LMCache or of us, and has ended before the server starts."""
    return stock_tokens(model, PROMPTS, NEW_TOKENS)


@pytest.fixture(scope="module")
def server(model: Path, redis: str | None, folder: Path, reference: list[list[int]]) -> Iterator[str]:
    home = kv_home(redis, folder)
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", "512", "--block-size", str(CHUNK_SIZE)]
    command += ["--enforce-eager", "--max-num-seqs", "4", "--no-enable-prefix-caching"]
    command += ["--kv-transfer-config", json.dumps(kv_transfer_config(home.address, patience.SECONDS))]
    environment = {"VLLM_PLUGINS": "vericache", "VERICACHE_TOKEN": TOKEN}
    url = f"http://127.0.0.1:{port}"
    with Service(command, lambda: accepts(port) and _answers(url), folder / "server.log", environment, patience.SECONDS):
        yield url
    home.close()


def _answers(url: str) -> bool:
    try:
        fetch(f"{url}/health")
    except RemoteError:
        return False
    return True


def _post(url: str, body: Any, token: str | None = None) -> Any:
    request = urllib.request.Request(url, data=json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=patience.SECONDS) as answer:
        return json.loads(answer.read())


def test_the_server_serves_others_as_ever(server: str, model: Path, reference: list[list[int]]) -> None:
    """Through vLLM's own route."""
    found = []
    for prompt in PROMPTS:
        body = {"model": str(model), "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
        answer = _post(f"{server}/v1/completions", {**body, "return_token_ids": True})
        found.append(answer["choices"][0]["token_ids"])
    assert found == reference


@pytest.mark.parametrize(
    ("compressor", "options"), [("kivi", {"bits": 4, "residual": 32}), ("uniform", {"bits": 2}), ("snapkv", {"keep": 0.5})]
)
def test_drafts_over_http(
    server: str, model: Path, reference: list[list[int]], figure: list[str], compressor: str, options: dict[str, Any]
) -> None:
    verifier = HttpVerifier(server, TOKEN, seconds=patience.SECONDS)
    until_served(verifier, PROMPTS)
    drafter = CompressedDrafter.from_pretrained(str(model), compressor, options=options, fold=16)
    outputs = generate(PROMPTS, NEW_TOKENS, verifier, drafter, window=6)
    drafter.engine.close()
    assert [output.token_ids for output in outputs] == reference
    assert all(output.reruns == 0 and output.degraded is None for output in outputs)
    cached, prompted = (sum(getattr(output, name) for output in outputs) for name in ("cached", "prompted"))
    rounds, accepted = (sum(getattr(output, name) for output in outputs) for name in ("rounds", "accepted"))
    assert cached > prompted / 2
    figure.append(
        f"HTTP, {compressor} {options}: identical; {rounds} rounds, mean accepted run {accepted / rounds:.2f} of 6, "
        f"external hits {cached} of {prompted} tokens"
    )


def test_a_wrong_token_is_refused(server: str) -> None:
    with pytest.raises(RemoteError, match="401"):
        HttpVerifier(server, "another token")
    for token in (None, "", "another token"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            _post(server + PATH, {"protocol": PROTOCOL, "checks": [{"verified": [5]}]}, token)
        assert refused.value.code == 401


@pytest.mark.parametrize(
    "body",
    [
        {"protocol": PROTOCOL + 1, "checks": [{"verified": [5]}]},
        {"protocol": PROTOCOL, "checks": [{"verified": []}]},
        {"protocol": PROTOCOL, "checks": [{"verified": [5], "drafts": [tiny.VOCAB]}]},
        {"protocol": PROTOCOL, "checks": [{"verified": [-1]}]},
        {"protocol": PROTOCOL, "checks": [{"verified": ["5"]}]},
        {"protocol": PROTOCOL, "checks": [{"verified": [5] * 512}]},
        {"protocol": PROTOCOL, "checks": [{"verified": [5]}] * 257},
        {"protocol": PROTOCOL, "checks": [{"verified": [5], "more": 1}]},
        ["nothing"],
    ],
)
def test_bad_messages_are_refused(server: str, body: Any) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        _post(server + PATH, body, TOKEN)
    assert 400 <= refused.value.code < 500


def test_a_long_prompt_is_refused_before_it_is_sent(server: str) -> None:
    with pytest.raises(PromptError, match="512"):
        generate([tiny.prompt(500, seed=3)], NEW_TOKENS, HttpVerifier(server, TOKEN))


@pytest.mark.parametrize("beside", [-1, 0, 1])
def test_verified_lengths_on_chunk_multiples(server: str, reference: list[list[int]], beside: int) -> None:
    """Nothing at or past the last verified token is served, though the store holds it."""
    verifier, tokens = HttpVerifier(server, TOKEN, seconds=patience.SECONDS), [*PROMPTS[0], *reference[0]]
    until_served(verifier, [tokens])
    verified = 7 * CHUNK_SIZE + beside
    verdict = verifier.verify([Check(tokens[:verified], tokens[verified : verified + 6])])[0]
    assert verdict.cached == (verified - 1) // CHUNK_SIZE * CHUNK_SIZE
    assert (verdict.accepted, verdict.token, verdict.reruns) == (6, tokens[verified + 6], 0)


def test_many_checks_at_once(server: str, reference: list[list[int]]) -> None:
    whole = [*PROMPTS[0], *reference[0]]
    checks = [Check(whole[: 200 + number], whole[200 + number : 204 + number]) for number in range(12)]
    verdicts = HttpVerifier(server, TOKEN, seconds=patience.SECONDS).verify(checks)
    assert [verdict.accepted for verdict in verdicts] == [4] * 12
    assert [verdict.token for verdict in verdicts] == whole[204:216]


def test_nobody_there() -> None:
    with pytest.raises(RemoteError, match="does not answer"):
        HttpVerifier(f"http://127.0.0.1:{free_port()}", TOKEN, tries=2)
    with pytest.raises(ConfigError, match="http://"):
        HttpVerifier("file:///etc/passwd", TOKEN)
