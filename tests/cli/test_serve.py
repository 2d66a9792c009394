"""``vericache serve`` as a process: it comes up, answers, stops in order; bad flags are told before a model is loaded."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models import build
from tests.serve.served import byte_tokenizer
from vericache_core.cli.main import main

TOKEN = "t" * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    build("llama", vocab_size=256).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def process(folder: str, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    (tmp_path / "tokens").write_text(TOKEN + "\n")
    flags = ["--listen", "127.0.0.1:0", "--json", "--token-file", str(tmp_path / "tokens"), "--model-name", "tiny"]
    flags += ["-c", "identity", "--rows", "16", "--no-probe", "--full-kv", "device", "--max-new-tokens", "400", "--grace", "60"]
    started = subprocess.Popen(
        [sys.executable, "-m", "vericache_core", "serve", "-m", folder, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    yield started
    started.kill()
    started.communicate()


def call(url: str, body: Any) -> Any:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=120)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.usefixtures("interruptible")
def test_it_serves_and_finishes_what_runs_before_it_stops(process: subprocess.Popen[str], number: int) -> None:
    assert process.stdout is not None
    assert process.stderr is not None
    ready = json.loads(process.stdout.readline())
    assert (ready["schema"], ready["model"]) == ("vericache.serve/1", "tiny")
    url, body = ready["url"] + "/completions", {"prompt": "abc" * 20}
    with call(url, {**body, "max_tokens": 3}) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 3
    with call(url, {**body, "stream": True, "stream_options": {"include_usage": True}}) as answer:
        first = answer.readline()
        assert first.startswith(b"data: ")
        process.send_signal(number)
        *_, usage, done, _ = answer.read().decode().split("\n\n")
    assert done == "data: [DONE]"
    assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == 400
    assert process.wait(60) == 0
    assert process.stderr.read().splitlines() == [f"vericache: serving tiny at {ready['url']}"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--listen", "0.0.0.0:0"], "anybody could call 0.0.0.0:0"),
        (["--listen", "0.0.0.0:0", "--insecure"], "without TLS"),
        (["--listen", "8000"], "expected HOST:PORT"),
        (["--token-file", "nowhere"], "token file 'nowhere' cannot be read"),
        (["--tls-cert", "x"], "go together"),
        (["--tls-cert", "x", "--tls-key", "y"], "TLS key 'y' cannot be read"),
        (["--plaintext", "--tls-cert", "x", "--tls-key", "y"], "exclude each other"),
        (["--grace", "-1"], "--grace is to be 0 or more"),
        (["--grace", "nan"], "--grace is to be 0 or more"),
        (["--seed", "4"], "--seed has no effect"),
        (["--logprobs", "4"], "--logprobs has no effect"),
        (["-c", "nosuch"], "nosuch"),
        (["--max-new-tokens", "-3"], "max_new_tokens"),
    ],
)
def test_bad_flags_are_told_before_a_model_is_loaded(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "-m", "/no/such/model", *flags]) == 2
    error, *_ = capsys.readouterr().err.splitlines()
    assert words in error


def test_a_port_that_is_taken_is_told_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "-m", "/no/such/model", "--listen", f"127.0.0.1:{port}"]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["serve"]) == 2
    assert "serving needs starlette" in capsys.readouterr().err
