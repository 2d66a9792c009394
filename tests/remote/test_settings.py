"""Settings and flags that a store or a drafter makes nothing of are told, or refused, before a model is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from tests.test_conflicts import SAMPLES
from vericache_core.cli.main import main
from vericache_core.config import EngineConfig, replace
from vericache_core.remote.settings import idle_in_a_store, of_a_store

pytest.importorskip("grpc", reason="needs vericache[remote]")

USED = {
    *("compressor", "keep", "keep_tokens", "options", "require_conformant", "disable_plugins"),  # to compress prefixes
    *("full_kv", "ring_layers", "link_bytes_per_s", "on_swap_error"),  # to verify without state
    *("scheduler", "device_budget", "max_running", "max_queue", "prefix_store", "max_model_len", "audit_every"),
    *("identity", "dtype", "rows", "shapes", "pack_weights", "fuse", "graphs", "device", "threads", "probe", "attention"),
}
CONFIGS: list[tuple[dict[str, Any], set[str]]] = [
    ({}, {"tenant", "swap_dir", "disk_budget"}),
    ({"full_kv": "disk"}, {"tenant", "host_budget"}),
    ({"prefix_store": "shm://x"}, {"swap_dir", "disk_budget"}),
]
ALWAYS = {"mode", "window", "proposer", "assistant", "fold", "calibration", "on_compressor_error"} | {
    name for name in SAMPLES if name.startswith("remote_") or name == "on_remote_error"
}


@pytest.mark.parametrize(("settings", "idle"), CONFIGS)
def test_each_setting_is_used_or_told(settings: dict[str, Any], idle: set[str]) -> None:
    """``remote`` alone is neither: with it there is no store."""
    sometimes = {"tenant", "swap_dir", "disk_budget", "host_budget"}
    assert ALWAYS | sometimes | USED | {"remote"} == set(SAMPLES)
    found = idle_in_a_store(EngineConfig(**settings), SAMPLES)
    assert set(found) == ALWAYS | idle
    assert all(found.values())
    assert idle_in_a_store(EngineConfig(**settings), USED) == {}


def test_what_is_told_is_taken_out() -> None:
    """So that no assistant is loaded, nothing measured, and no scheduler chosen, for the sake of what does nothing."""
    plain = EngineConfig(compressor="random", keep=0.5, full_kv="host")
    given = {name: SAMPLES[name] for name in ALWAYS - {"remote_plaintext"}}  # which contradicts remote_ca
    assert of_a_store(replace(plain, **given)) == plain
    assert of_a_store(replace(plain, remote_plaintext=True)) == plain


def test_a_store_tells_what_it_makes_nothing_of(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERICACHE_FOLD", "64")
    argv = ["store", "serve", "-m", "/nowhere", "--insecure", "--listen", "127.0.0.1:0", "--window", "4", "--tenant", "x"]
    assert main([*argv, "--threads", "1"]) != 0
    told = [line for line in capsys.readouterr().err.splitlines() if "has no effect" in line]
    assert [line.partition(" has no effect: ")[0] for line in sorted(told)] == [
        "vericache: warning: fold (environment)",
        "vericache: warning: tenant (arguments)",
        "vericache: warning: window (arguments)",
    ]


def test_a_drafter_tells_what_it_makes_nothing_of(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["draft", "-m", "/nowhere", "--remote", "127.0.0.1:9", "-c", "random", "--window", "4", "a prompt"]
    assert main([*argv, "--fold", "64", "--ring-layers", "3", "--swap-dir", "/x", "--on-compressor-error", "fail"]) != 0
    told = [line for line in capsys.readouterr().err.splitlines() if "has no effect" in line]
    assert [line.split()[2] for line in sorted(told)] == ["fold", "on_compressor_error", "ring_layers", "swap_dir"]
    assert main([*argv, "--remote-mode", "fetch"]) != 0
    told = [line for line in capsys.readouterr().err.splitlines() if "has no effect" in line]
    assert [line.split()[2] for line in sorted(told)] == ["compressor", "window"]


@pytest.mark.fault("settings", "flags of a store or a drafter that do nothing beside others")
@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["store", "serve", "--insecure", "--token-file", "t"], "--insecure has no effect (with --token-file"),
        (["store", "serve", "--insecure", "--client-ca", "c"], "--insecure has no effect (with --client-ca"),
        (["store", "serve", "--plaintext", "--tls-cert", "c"], "--plaintext has no effect (with --tls-cert"),
        (["draft", "--remote", "127.0.0.1:9", "--check", "a prompt"], "takes no PROMPT"),
        (["draft", "--remote", "127.0.0.1:9", "--check", "-f", "file"], "--file has no effect (--check writes nothing"),
        (["draft", "--remote", "127.0.0.1:9", "--check", "--temperature", "1"], "--temperature has no effect"),
        (["draft", "--remote", "127.0.0.1:9", "--check", "--stop", "x"], "--stop has no effect"),
    ],
)
def test_a_flag_that_does_nothing_is_refused(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*argv, "-m", "/nowhere"]) == 2
    assert text in capsys.readouterr().err
