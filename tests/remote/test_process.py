"""The store and the drafter as the processes that a user starts; the store is killed while it verifies."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.models import build
from tests.remote.stores import token_file
from vericache_core.cli.main import main

PREFIX = "the quick brown fox jumps over the lazy dog, and the dog sleeps. " * 4
TASKS = ["What did the fox do?", "And the dog?"]
FAST = ["--rows", "16", "--no-probe", "--no-plugins"]
ENGINE = [*FAST, "-c", "random", "--keep", "0.5", "--window", "4"]
DRAFTER = [*ENGINE, "--max-new-tokens", "24"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama and a byte-level tokenizer, saved, and a prefix file."""
    path = tmp_path_factory.mktemp("model")
    build("llama").save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    (path / "prefix.txt").write_text(PREFIX)
    return path


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A store process and where it listens."""
    command = [sys.executable, "-m", "vericache_core", "store", "serve", "-m", str(folder), "--listen", "127.0.0.1:0", "--json"]
    command += ["--full-kv", "device", "--token-file", token_file(folder), *FAST, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())["listen"]
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def drafted(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> dict[str, Any]:
    file = str(folder / "prefix.txt")
    assert main(["draft", "-m", str(folder), "-f", file, "--json", *DRAFTER, *arguments, *TASKS]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def expected(capsys: pytest.CaptureFixture[str], folder: Path) -> list[list[int]]:
    tokens = []
    for task in TASKS:
        arguments = ["-m", str(folder), "--full-kv", "device", "--raw", "--json", "--max-new-tokens", "24", *FAST]
        assert main(["generate", *arguments, PREFIX + task]) == 0
        tokens.append(json.loads(capsys.readouterr().out)["token_ids"])
    return tokens


@pytest.mark.slow
def test_draft_check_and_stop(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link = ["--remote-token-file", token_file(folder)]
    audits = ["--audit-every", "1"]
    with serving(folder, "-c", "random", "--keep", "0.5", "--prefix", str(folder / "prefix.txt"), *audits) as (
        process,
        address,
    ):
        found = drafted(capsys, folder, "--remote", address, *link, *audits)
        assert all(output["identical"] is True for output in found["outputs"])
        assert [output["token_ids"] for output in found["outputs"]] == expected(capsys, folder)
        assert all(output["mode"] == "remote" and not output["degraded"] for output in found["outputs"])
        assert main(["draft", "-m", str(folder), "--check", "--json", "--remote", address, *link, *ENGINE]) == 0
        assert json.loads(capsys.readouterr().out)["bytes_per_second"] > 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def scraped(address: str) -> str:
    """What a store's metrics say."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        text: str = answer.read().decode()
    return text


@pytest.mark.fault("verifier", "killed or stopped and started again")
@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_restarted_store_computes_no_prefix_again(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], end: signal.Signals
) -> None:
    """Two lives of a store process over one prefix store; the second loads what the first computed."""
    link = ["--remote-token-file", token_file(folder)]
    shared = len(PREFIX)  # a token is a byte
    right = expected(capsys, folder)
    computed, loaded, compressions = [], [], []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            metrics = f"127.0.0.1:{free.getsockname()[1]}"
        arguments = ["--prefix-store", f"file://{tmp_path}?chunk=128&timeout=60", "--metrics", metrics]
        with serving(folder, *arguments) as (process, address):
            found = drafted(capsys, folder, "--remote", address, *link)
            assert [output["token_ids"] for output in found["outputs"]] == right
            assert all(output["mode"] == "remote" and not output["degraded"] for output in found["outputs"])
            deadline = time.monotonic() + 60
            while len(list(tmp_path.glob("blobs/*-*"))) < 5 and time.monotonic() < deadline:  # a note, 2 chunks, tail, codes
                time.sleep(0.1)
            text = scraped(metrics)
            values = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line[0] != "#"}
            computed.append(values['vericache_prompt_tokens_total{source="computed"}'])
            loaded.append(values.get('vericache_prompt_tokens_total{source="store"}', 0.0))
            compressions.append(values.get('vericache_compress_seconds_count{compressor="random"}', 0.0))
            process.send_signal(end)
            process.wait(30)
    assert loaded == [0, shared]
    assert compressions == [1, 0]
    assert computed[0] - computed[1] == shared  # what is left is each request's own


@pytest.mark.slow
def test_lines_in_lines_out(folder: Path) -> None:
    with serving(folder, "-c", "random", "--keep", "0.5") as (_, address):
        command = [sys.executable, "-m", "vericache_core", "draft", "-m", str(folder), "--remote", address, *FAST]
        command += ["--token-file", token_file(folder), "--max-new-tokens", "8"]  # the compressor is the store's
        lines = "\n".join([json.dumps({"id": "a", "prompt": PREFIX}), "nonsense", json.dumps({"prompt": PREFIX + "x"}), "[]"])
        done = subprocess.run(command, input=lines, capture_output=True, text=True, check=True, timeout=120)
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        assert sorted(len(answer.get("token_ids", [])) for answer in answers) == [0, 0, 8, 8]
        assert {answer["id"] for answer in answers if "mode" in answer} == {"a", 1}
        assert all(answer["mode"] == "remote" for answer in answers if "mode" in answer)


@pytest.mark.fault("verifier", "`kill -9` behind its third verdict")
@pytest.mark.slow
def test_killed_while_it_verifies(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """``kill -9`` of the store after its third verdict: the drafter goes on by itself, with the same tokens."""
    from vericache_core.remote.session import RemoteSession

    right = expected(capsys, folder)
    with serving(folder) as (process, address):
        take = RemoteSession.take_verdict
        seen = []

        def take_verdict(self: RemoteSession, *arguments: Any, **named: Any) -> None:
            seen.append(self)
            if len(seen) == 3:
                process.kill()
            take(self, *arguments, **named)

        monkeypatch.setattr(RemoteSession, "take_verdict", take_verdict)
        link = ["--remote", address, "--remote-token-file", token_file(folder), "--remote-timeout", "5"]
        found = drafted(capsys, folder, *link)
    assert [output["token_ids"] for output in found["outputs"]] == right
    assert any(output["degraded"] for output in found["outputs"])
