"""The remote benchmark on a random model of a few kilobytes: two namespaces, two rates, two delays, one command."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.models import build

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "remote.py"
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def saved(folder: Path) -> str:
    """A random Llama with a byte-level tokenizer that has a chat template."""
    build("llama", max_position_embeddings=2048).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE({token: n for n, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT).save_pretrained(folder)
    return str(folder)


def namespaces() -> set[str]:
    return {line.split()[0] for line in subprocess.check_output(["ip", "netns", "list"], text=True).splitlines()}


def benchmark(*arguments: str) -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, str(PROGRAM), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"), reason="needs root and the tools ip and tc"
)
def test_rates_and_delays_in_one_command(tmp_path: Path) -> None:
    before = namespaces()
    model = ["-m", saved(tmp_path), "--prefix", "600", "--requests", "2", "--tokens", "16", "--window", "4"]
    chosen = ["--rate", "5,50", "--delay-ms", "0,40", "--repeats", "1", "--compressors", "snapkv", "--modes", "verify,fetch"]
    reports = benchmark(*model, *chosen)
    assert namespaces() == before, "a namespace was left behind"
    pairs = [(report["conditions"]["rate_mbit"], report["conditions"]["delay_ms"]) for report in reports]
    assert pairs == [(5, 0), (5, 40), (50, 0), (50, 40)]
    for report in reports:
        assert report["summary"]["identical"]
        assert [run["mode"] for run in report["runs"]] == ["verify", "fetch"]
        assert not any(run["degraded"] for run in report["runs"])
        kept = report["summary"]["compressors"]["snapkv"]["bytes_kept"]
        assert 0.2 < kept < 0.4
        if report["conditions"]["delay_ms"]:
            verify, fetch = report["runs"]
            assert verify["verdict_seconds"] >= 2 * 0.040, "an answer that came sooner than light"
            assert fetch["transfer_seconds"] >= 2 * 0.040
