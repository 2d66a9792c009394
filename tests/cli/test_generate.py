"""The generate and doctor commands, run on a tiny model that lies in a folder as users' models do."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.models import build
from vericache_core.cli.main import main
from vericache_core.engine import Engine
from vericache_core.runtime.sampling_params import SamplingParams

PROMPT = "the quick brown fox jumps over the lazy dog, and the dog sleeps. " * 6
FAST = ["--rows", "16", "--window", "4", "--full-kv", "device", "--no-probe"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama and a byte-level tokenizer, saved."""
    path = tmp_path_factory.mktemp("model")
    build("llama").save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(["generate", *argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_compare_full_says_identical_and_measures(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "-m", folder, "-c", "random", "--keep", "0.5", "--compare-full", "--max-new-tokens", "20", *FAST, PROMPT
    )
    assert code == 0
    assert "identical: 20/20 tokens, logits bitwise equal" in out
    assert "acceptance: " in out
    assert "KV bytes: " in out
    assert "seconds: prefill" in out


def test_compare_full_fails_when_an_output_differs(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Engine.generate

    def wrong(self: Engine, *args: Any, **kwargs: Any) -> Any:
        outputs = right(self, *args, **kwargs)
        if kwargs.get("compressor", "") is None:
            assert outputs[0].logits is not None
            outputs[0].logits[3, 0] += 1
        return outputs

    monkeypatch.setattr(Engine, "generate", wrong)
    code, out, _ = run(capsys, "-m", folder, "-c", "identity", "--compare-full", "--max-new-tokens", "8", *FAST, PROMPT)
    assert code == 1
    assert "NOT identical: 8/8 tokens, logits differ" in out


def test_identity_token_compares_with_transformers(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "-m", folder, "-c", "identity", "--compare-full", "--identity", "token", "--max-new-tokens", "8", *FAST, PROMPT
    )
    assert code == 0
    assert "identical: 8/8 tokens, against transformers generate" in out


def test_json_has_everything_a_program_needs(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys,
        "-m",
        folder,
        "-c",
        "random",
        "--keep",
        "0.5",
        "--json",
        "--logprobs",
        "2",
        "--max-new-tokens",
        "6",
        *FAST,
        PROMPT,
    )
    assert code == 0
    result = json.loads(out)
    assert result["schema"] == "vericache.generate/1"
    assert len(result["token_ids"]) == len(result["logprobs"]) == 6
    assert result["metrics"]["compressed_kv_bytes"] < result["metrics"]["compressed_from_bytes"]
    assert 0 <= result["metrics"]["acceptance"] <= 1


def test_stream_prints_the_text_of_generate(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["-m", folder, "-c", "random", "--max-new-tokens", "30", *FAST, PROMPT]
    _, whole, _ = run(capsys, *arguments)
    code, streamed, _ = run(capsys, "--stream", *arguments)
    assert code == 0
    assert streamed == whole


def test_files_come_before_the_prompt_and_stdin_works(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "context.txt"
    text.write_text(PROMPT)
    arguments = ["-m", folder, "--json", "--max-new-tokens", "4", *FAST]
    _, from_file, _ = run(capsys, *arguments, "-f", str(text), "And then?")
    _, from_argument, _ = run(capsys, *arguments, PROMPT + "\n\nAnd then?")
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    _, from_stdin, _ = run(capsys, *arguments, "-")
    _, alone, _ = run(capsys, *arguments, PROMPT)
    assert json.loads(from_file)["token_ids"] == json.loads(from_argument)["token_ids"]
    assert json.loads(from_stdin)["token_ids"] == json.loads(alone)["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["-c", "rundom", "x"], "did you mean 'random'"),
        (["-c", "nonesuch", "x"], "try: pip install vericache-compressor-nonesuch"),
        (["-c", "random", "--keep", "0", "x"], "keep"),
        (["-c", "random", "--keep", "1.5", "x"], "keep"),
        (["-c", "random", "--keep", "0.5", "--keep-tokens", "4", "x"], "keep_tokens"),
        (["-c", "random", "-o", "sead=1", "x"], "did you mean 'seed'"),
        (["--window", "0", "x"], "window"),
        (["--temperature", "-1", "x"], "temperature"),
        (["-f", "no-such-file", "x"], "cannot read no-such-file"),
        ([""], "empty"),
        (["--system", "be brief", "x"], "chat template"),
        (["--stream", "--json", "x"], "exclude"),
        (["--max-new-tokens", "2000", "x"], "positions"),
        (["x" * 1100], "1100 tokens"),
    ],
)
def test_bad_input_is_one_line_with_a_hint_and_exit_code_2(
    folder: str, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = [part for part in FAST if part not in ("--window", "4")]  # which would be told of, beside the error
    code, out, err = run(capsys, "-m", folder, *plain, *arguments)
    assert code == 2
    assert out == ""
    assert says in err
    assert err.startswith("vericache: error: ")
    assert err.count("\n") <= 2


def test_a_model_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in (str(tmp_path / "model.gguf"), str(tmp_path)):
        code, _, err = run(capsys, "-m", name, "x")
        assert code == 2
        assert "vericache: error: model" in err


def test_gguf_without_its_package(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else find(name, *rest))
    file = tmp_path / "weights.gguf"
    file.write_bytes(b"GGUF")
    code, _, err = run(capsys, "-m", str(file), "x")
    assert code == 2
    assert "pip install 'vericache[gguf]'" in err


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_with_130_and_leaves_no_file(folder: str, tmp_path: Path) -> None:
    swap = tmp_path / "swap"
    swap.mkdir()
    argv = [
        "generate",
        "-m",
        folder,
        "-c",
        "random",
        "--full-kv",
        "disk",
        "--swap-dir",
        str(swap),
        "--no-probe",
        "--ignore-eos",
        "--link-bytes-per-s",  # hundreds of swaps of a tenth of a second and more: minutes
        "1e6",
    ]
    argv += ["--stream", "--max-new-tokens", "600", PROMPT]
    child = subprocess.Popen(
        [sys.executable, "-m", "vericache_core.cli.main", *argv],
        env={**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stdout.read(1), "nothing was streamed"
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=120)
    assert child.returncode == 130
    assert b"interrupted" in err
    assert b"Traceback" not in err
    assert not list(swap.iterdir())


def test_doctor_reports_the_probe(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "-m", folder, "--rows", "16", "--no-plugins", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["identity"]["holds"]
    assert facts["identity"]["logits_rows"] > 70
    assert facts["plugins"] == {"adversarial": "ok", "identity": "ok", "random": "ok"}
    assert facts["engine"]["layers"] == 3
    assert main(["doctor", "-m", folder, "--rows", "16", "--no-plugins"]) == 0
    assert "bitwise: holds" in capsys.readouterr().out


def test_doctor_says_when_the_promise_is_broken(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vericache_core.attention.paged import attend_reference

    def uneven(query: torch.Tensor, *rest: Any) -> torch.Tensor:
        output = attend_reference(query, *rest)
        return output * (1 + 1e-6 * torch.arange(len(output)).view(-1, 1, 1))

    monkeypatch.setattr("vericache_core.engine.choose_attention", lambda *_: ("uneven", uneven))
    assert main(["doctor", "-m", folder, "--rows", "16", "--no-plugins"]) == 1
    assert "BROKEN" in capsys.readouterr().out


def test_the_model_still_answers_by_itself(folder: str) -> None:
    """After an engine has used a model, plain transformers generation on it is as before."""
    loaded = build("llama")
    ids = torch.tensor([list(range(5, 60))])
    before = loaded.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
    from vericache_core.config import EngineConfig

    with Engine(loaded, None, EngineConfig(rows=16, probe=False)) as engine:
        engine.generate(ids[0].tolist(), SamplingParams(max_new_tokens=4), compressor="random")
    after = loaded.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12)
    assert torch.equal(before, after)
