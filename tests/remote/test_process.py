"""The store and the drafter as the processes that a user starts; the store is killed while it verifies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
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
DRAFTER = [*FAST, "-c", "random", "--keep", "0.5", "--window", "4", "--max-new-tokens", "24"]


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
    with serving(folder, "-c", "random", "--keep", "0.5", "--prefix", str(folder / "prefix.txt")) as (process, address):
        found = drafted(capsys, folder, "--remote", address, *link)
        assert [output["token_ids"] for output in found["outputs"]] == expected(capsys, folder)
        assert all(output["mode"] == "remote" and not output["degraded"] for output in found["outputs"])
        assert main(["draft", "-m", str(folder), "--check", "--json", "--remote", address, *link, *DRAFTER]) == 0
        assert json.loads(capsys.readouterr().out)["bytes_per_second"] > 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


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
