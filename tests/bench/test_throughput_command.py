from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from tests.models import VOCAB, engine_over, model
from vericache_core.bench.throughput import peer as peer_module
from vericache_core.bench.throughput.engines import EngineSystem
from vericache_core.bench.throughput.measured import Measured
from vericache_core.bench.throughput.page import PHASES
from vericache_core.bench.throughput.workloads import SHAPES, Workload, build_workloads, lengths, names_of
from vericache_core.cli.bench_throughput_report import SCHEMA
from vericache_core.cli.main import main
from vericache_core.config import EngineConfig
from vericache_core.engine import Engine
from vericache_core.errors import UsageError
from vericache_core.plugins.registry import set_default_registry

ASKED = [
    "system",
    "workload",
    "tokens_per_s",
    "speedup_vs_plain",
    "identical",
    "peak_device_kv_bytes",
    "swap_hidden_fraction",
]
SMALL = ["--no-plugins", "-c", "random:keep=0.5", "--requests", "2", "--context", "160", "--new-tokens", "10", "--repeats", "2"]


class Words:
    """A tokenizer of words."""

    def encode(self, text: str, **_: object) -> list[int]:
        return [sum(map(ord, word)) % VOCAB for word in text.split()]

    def decode(self, ids: list[int], **_: object) -> str:
        return " ".join("x" * token for token in ids)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A tiny model in place of the one asked for."""
    monkeypatch.setattr(Engine, "from_pretrained", lambda *_, **__: engine_over(model("llama"), Words(), compressor=None))
    yield
    set_default_registry(None)


def test_one_json_row_per_system_and_workload(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = {kind: str(tmp_path / f"out.{kind}") for kind in ("markdown", "html", "lines")}
    flags = [*SMALL, "--workloads", "easy,slow-host-30", "--systems", "vericache,lossy,ngram,transformers", "--set", "rows=16"]
    written = [part for kind, path in files.items() for part in (f"--{kind}", path)]
    flags += ["--requests", "16"]  # so that a quarter of what all need is enough for one of them
    code = main(["bench", "throughput", *flags, "--window", "2", "--window", "6", "--window", "2", "--json", *written])
    caught = capsys.readouterr()
    rows = [json.loads(line) for line in caught.out.splitlines()]
    assert code == 0, caught.err
    names = ["plain", "vericache random:keep=0.5 x2", "vericache random:keep=0.5 x6", "lossy random:keep=0.5", "ngram"]
    assert {(row["system"], row["workload"]) for row in rows} == {
        (name, which) for name in [*names, "transformers"] for which in ("easy", "slow-host-30")
    }
    assert len(rows) == 12
    for row in rows:
        assert [key for key in row if key != "schema"][: len(ASKED)] == ASKED
        assert row["schema"] == SCHEMA
        assert set(row["tokens_per_s"]) == {"median", "min", "max"}
        if row["error"] is None:
            assert row["runs"] == 2
            assert row["tokens_per_s"]["min"] <= row["tokens_per_s"]["median"] <= row["tokens_per_s"]["max"]
    found = {(row["system"], row["workload"]): row for row in rows}
    assert found[names[1], "easy"]["identical"] is True
    assert found[names[2], "slow-host-30"]["identical"] is True
    assert 0 <= found[names[2], "slow-host-30"]["swap_hidden_fraction"] <= 1
    assert found["plain", "easy"]["prefill_seconds"] > 0
    assert found["transformers", "slow-host-30"]["skipped"] is True
    assert "run 2 of 2" in caught.err

    page = Path(files["html"]).read_text(encoding="utf-8")
    plots = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    for drawn in plots:
        ET.fromstring(drawn)
    titles = (
        "easy: throughput",
        "slow-host-30: throughput",
        "Steps and swaps of each request",
        "Tokens drafted before each verify",
        "KV by tier",
    )
    assert all(title in page for title in titles)
    assert "<script" not in page
    assert "src=" not in page
    inside = dict(re.findall(r"<summary>(.*?)</summary>(.*?)</details>", page, re.DOTALL))
    timeline = inside[f"slow-host-30: {names[2]}"]
    assert timeline.count(f'fill="{PHASES["draft"]}"') > 1  # one is the legend's
    assert timeline.count(f'fill="{PHASES["swap"]}"') > 1
    assert f'fill="{PHASES["swap"]}"' not in inside[f"easy: {names[0]}"]  # nor in its legend: nothing is swapped

    table = Path(files["markdown"]).read_text(encoding="utf-8")
    order = [line.split(" | ")[1] for line in table.splitlines() if line.startswith("| easy")]
    assert order == [*names, "transformers"]  # whoever was skipped first
    assert table.count("\n| ") + 1 == 13
    assert main(["bench", "throughput", "--render", files["lines"], "--json"]) == 0
    assert {json.dumps(json.loads(line)) for line in capsys.readouterr().out.splitlines()} == {json.dumps(row) for row in rows}


def test_an_interrupt_leaves_what_was_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, runs = EngineSystem.run, []

    def interrupted(self: EngineSystem, workload: Workload) -> Measured:
        runs.append(self.name)
        if len(runs) == 4:
            raise KeyboardInterrupt
        return real(self, workload)

    monkeypatch.setattr(EngineSystem, "run", interrupted)
    lines, page = tmp_path / "runs", tmp_path / "page.html"
    flags = [*SMALL, "--workloads", "hard", "--systems", "vericache", "--lines", str(lines), "--html", str(page)]
    assert main(["bench", "throughput", *flags]) == 130
    out = capsys.readouterr().out
    assert out.count("hard") == 2
    assert "vericache random:keep=0.5" in page.read_text(encoding="utf-8")
    with lines.open("a", encoding="utf-8") as file:
        file.write('{"system": "cut o')  # as a kill leaves it
    assert main(["bench", "throughput", "--render", str(lines), "--json"]) == 0
    rows = {row["system"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert rows["plain"]["runs"] == 2
    assert rows["vericache random:keep=0.5"]["runs"] == 1
    assert rows["vericache random:keep=0.5"]["identical"] is True


def test_wrong_tokens_fail_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = EngineSystem.run

    def bent(self: EngineSystem, workload: Workload) -> Measured:
        measured = real(self, workload)
        if self.name.startswith("vericache"):
            measured.tokens[1][3] ^= 1
        return measured

    monkeypatch.setattr(EngineSystem, "run", bent)
    assert main(["bench", "throughput", *SMALL, "--workloads", "easy", "--systems", "vericache", "--json"]) == 1
    rows = {row["system"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert rows["plain"]["identical"] is True
    assert rows["vericache random:keep=0.5"]["identical"] is False
    assert rows["vericache random:keep=0.5"]["first_difference"] == 3


def test_a_peer_takes_part(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peer_module.KINDS, "vllm", "peer_fake")
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(peer_module.PeerSystem.__init__, "__defaults__", (Path(__file__).parent,))
    flags = [part for part in SMALL if part not in ("-c", "random:keep=0.5")]  # nothing here would take a compressor
    flags += ["--workloads", "easy", "--systems", "plain", "--peer", f"vllm={sys.executable}", "--json"]
    assert main(["bench", "throughput", *flags]) == 0
    rows = {row["system"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert set(rows) == {"plain", "vllm"}
    assert rows["vllm"]["tokens_per_s"]["median"] == 10 * 2 / 0.5
    assert rows["vllm"]["identical"] is False  # which is its right
    assert (rows["plain"]["identical_requests"], rows["vllm"]["identical_requests"]) == (2, 0)
    assert all(row["step_seconds"]["median"] > 0 for row in rows.values())


def test_kvpress_is_two_systems_and_llama_cpp_wants_a_gguf_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("kvpress", "llama-cpp"):
        monkeypatch.setitem(peer_module.KINDS, name, "peer_fake")
    monkeypatch.setattr(peer_module.PeerSystem.__init__, "__defaults__", (Path(__file__).parent,))
    peers = ["--peer", f"kvpress={sys.executable}", "--peer", f"llama-cpp={sys.executable}"]
    flags = [*SMALL, "--repeats", "1", "--model", "folder", "--workloads", "easy", "--systems", "plain", *peers, "--json"]
    assert main(["bench", "throughput", *flags]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    notes = {row["system"]: ", ".join(row["notes"]) for row in rows}
    assert list(notes) == ["plain", "kvpress snapkv:keep=0.5", "kvpress", "llama-cpp"]
    assert "keep 0.5" in notes["kvpress snapkv:keep=0.5"]
    assert "keep None" in notes["kvpress"]
    assert "gguf None" in notes["llama-cpp"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["-c", "nothing"], "unknown compressor 'nothing'"),
        (["-c", "random:keep"], "not of the form key=value"),
        (["--systems", "vllm"], "unknown system 'vllm'"),
        (["--systems", "transfomers"], "did you mean 'transformers'"),
        (["--workloads", "lnog"], "did you mean 'long'"),
        (["--requests", "0"], "--requests must be at least 1"),
        (["--new-tokens", "2"], "--new-tokens must be at least 4"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--context", "10"], "--context must be at least 64"),
        (["--threads", "0"], "--threads must be at least 1"),
        (["--window", "-3"], "neither a positive number nor auto"),
        (["--set", "rosw=3"], "did you mean 'rows'"),
        (["--set", "rows=many"], "--set rows"),
        (["--set", "compressor=random"], "named with -c"),
        (["--peer", "vllm"], "not of the form NAME=/path/to/python"),
        (["--peer", "vlm=/usr/bin/python3"], "did you mean 'vllm'"),
        (["--peer", "vllm=/no/python"], "/no/python is no program"),
        (["--peer", f"vllm={sys.executable}", "--peer", f"vllm={sys.executable}"], "--peer vllm is given twice"),
        (["--peer", f"vllm={sys.executable}", "--peer-timeout", "0"], "--peer-timeout must be more than 0"),
        (["--lines", "/no/such/folder/x"], "cannot be written"),
        (["--html", "/no/such/folder/x"], "cannot be written"),
        (["--render", "/no/such/file"], "cannot be read"),
    ],
)
def test_a_mistake_is_one_error_before_anything_runs(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineSystem, "run", lambda *_: pytest.fail("something ran"))
    command = ["--no-plugins", *(["-c", "random:keep=0.5"] if "-c" not in flags else []), *flags]
    if "--render" in flags:  # it takes no others
        command = flags
    assert main(["bench", "throughput", *command]) == 2
    caught = capsys.readouterr()
    assert words in caught.err
    assert caught.err.count("error:") == 1
    assert not caught.out


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"VERICACHE_KEEP": "0.5"}, "VERICACHE_KEEP: what a compressor keeps is given with -c"),
        ({"VERICACHE_COMPRESSOR": "snapkv"}, "VERICACHE_COMPRESSOR: compressors are named with -c"),
        ({"VERICACHE_DEVICE_BUDGET": "9"}, "VERICACHE_DEVICE_BUDGET: each workload has a cap"),
        ({"VERICACHE_FULL_KV": "remote", "VERICACHE_REMOTE": "a:1"}, "full_kv=remote: a store is not measured here"),
    ],
)
def test_an_environment_that_would_be_dropped_is_refused(
    environment: dict[str, str], words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "from_pretrained", lambda *_, **__: pytest.fail("a model was loaded"))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["bench", "throughput", *SMALL]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("environment", "flags", "expected"),
    [
        ({}, [], ("device", "auto", None)),
        ({"VERICACHE_FULL_KV": "disk", "VERICACHE_DTYPE": "float32", "VERICACHE_THREADS": "1"}, [], ("disk", "float32", 1)),
        ({"VERICACHE_FULL_KV": "disk", "VERICACHE_DTYPE": "float32"}, ["--dtype", "auto"], ("disk", "auto", None)),
        ({"VERICACHE_FULL_KV": "disk"}, ["--full-kv", "device", "--threads", "2"], ("device", "auto", 2)),
    ],
)
def test_flags_win_over_the_environment_and_that_over_defaults(
    environment: dict[str, str], flags: list[str], expected: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[EngineConfig] = []

    def stop(_model: str, config: EngineConfig, **_: Any) -> Engine:
        seen.append(config)
        raise UsageError("enough")

    monkeypatch.setattr(Engine, "from_pretrained", stop)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["bench", "throughput", *SMALL, *flags]) == 2
    assert [(config.full_kv, config.dtype, config.threads) for config in seen] == [expected]


def test_a_context_beyond_the_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "throughput", "--no-plugins", "-c", "random", "--context", "1000", "--new-tokens", "25"]) == 2
    caught = capsys.readouterr()
    assert "exceed the model's 1024 positions" in caught.err
    assert "--context 999 fits" in caught.err
    assert not caught.out


def test_runs_of_before_are_not_written_over(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = tmp_path / "runs"
    lines.write_text("precious", encoding="utf-8")
    assert main(["bench", "throughput", *SMALL, "--lines", str(lines)]) == 2
    assert "exists" in capsys.readouterr().err
    assert lines.read_text(encoding="utf-8") == "precious"


def test_workloads_have_the_shape_that_they_say() -> None:
    names = names_of(["long", "slow-tier", "long", "mixed"])
    assert names == ["long", "slow-disk", "slow-host-30", "slow-host-60", "mixed"]
    made = {one.name: one for one in build_workloads(Words(), names, 8, [800], 32)}
    long = made["long"]
    assert [len(prompt.token_ids) for prompt in long.prompts] == lengths(SHAPES["long"], 8, 800)
    assert (len(long.prompts[0].token_ids), len(long.prompts[-1].token_ids)) == (600, 800)
    assert [prompt.kind for prompt in long.prompts] == ["easy", "hard"] * 4
    assert len({prompt.token_ids[:50] for prompt in long.prompts}) == 8
    assert made["slow-host-60"].prompts == long.prompts
    assert (made["slow-host-60"].slowdown, made["slow-disk"].tier, made["slow-disk"].budget_share) == (60, "disk", 0.25)
    copy = long.prompts[0].token_ids  # begins to repeat its own beginning
    assert copy[-48:] == copy[:48]
    assert {len(prompt.token_ids) for prompt in made["mixed"].prompts} == {400}
    ragged = lengths(SHAPES["ragged"], 5, 1600)
    assert ragged == [100, 200, 400, 800, 1600]
    assert lengths(SHAPES["short"], 1, 64) == [8]
    two = build_workloads(Words(), ["long"], 2, [100, 200], 8)
    assert [one.name for one in two] == ["long@100", "long@200"]
