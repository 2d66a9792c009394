"""Settings that do not go together: each pair by itself, and any two of them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any, Final

import pytest

from vericache_core.cli import main as cli
from vericache_core.config import EngineConfig, replace, without_effect
from vericache_core.config.conflicts import CLASHES, IDLE, Uses
from vericache_core.errors import ConfigError
from vericache_core.plugins.fields import option_fields

REMOTE: Final = {"full_kv": "remote", "remote": "localhost:7000"}
CLASHING: Final[list[tuple[dict[str, Any], str]]] = [
    ({"keep": 0.5, "keep_tokens": 8}, "keep=0.5 and keep_tokens=8 are both given"),
    ({"full_kv": "remote"}, "full_kv=remote and remote=HOST:PORT go together"),
    ({"remote": "localhost:7000"}, "full_kv=remote and remote=HOST:PORT go together"),
    ({"mode": "pinned", "full_kv": "disk"}, "mode=pinned and full_kv=disk exclude each other"),
    ({**REMOTE, "mode": "plain"}, "mode=plain and full_kv=remote exclude each other"),
    ({**REMOTE, "mode": "pinned"}, "mode=pinned and full_kv=remote exclude each other"),
    ({**REMOTE, "mode": "auto"}, "mode=auto and full_kv=remote exclude each other"),
    ({**REMOTE, "remote_ca": "a.pem", "remote_cert": "c.pem"}, "remote_cert and remote_key go together"),
    ({**REMOTE, "remote_ca": "a.pem", "remote_key": "k.pem"}, "remote_cert and remote_key go together"),
    ({**REMOTE, "remote_cert": "c.pem", "remote_key": "k.pem"}, "remote_cert is given without remote_ca"),
    ({**REMOTE, "remote_ca": "a.pem", "remote_plaintext": True}, "remote_ca and remote_plaintext exclude each other"),
    ({"prefix_store": "shm://x", "identity": "token"}, "prefix_store needs identity='bitwise'"),
]
DRAFTS: Final = {"compressor": "random", "keep": 0.5}
IDLING: Final[list[tuple[dict[str, Any], str, dict[str, Any]]]] = [
    # what is set, what of it does nothing, and a change with which it does something
    ({**DRAFTS, "mode": "plain"}, "compressor", {"mode": "pinned"}),
    ({**DRAFTS, "mode": "plain"}, "keep", {"mode": "pinned"}),
    ({"compressor": "random", "keep_tokens": 9, "mode": "plain"}, "keep_tokens", {"mode": "auto"}),
    ({"compressor": "kivi", "options": {"bits": 2}, "mode": "plain"}, "options", {"mode": "offloaded"}),
    ({**DRAFTS, "mode": "plain", "fold": 3}, "fold", {"mode": "offloaded"}),
    ({**DRAFTS, **REMOTE, "fold": 3}, "fold", {"full_kv": "host", "remote": None}),
    ({**DRAFTS, **REMOTE, "on_compressor_error": "fail"}, "on_compressor_error", {"full_kv": "host", "remote": None}),
    ({**REMOTE, "compressor": "random", "keep_tokens": 9, "remote_mode": "fetch"}, "keep_tokens", {"remote_mode": "verify"}),
    ({**REMOTE, "compressor": "kivi", "options": {"bits": 2}, "remote_mode": "local"}, "options", {"remote_mode": "auto"}),
    ({**DRAFTS, **REMOTE, "remote_mode": "remote"}, "keep", {"remote_mode": "verify-stateless"}),
    ({**DRAFTS, "mode": "plain", "on_compressor_error": "fail"}, "on_compressor_error", {"mode": "offloaded"}),
    ({**DRAFTS, **REMOTE, "remote_mode": "fetch"}, "compressor", {"remote_mode": "verify"}),
    ({**DRAFTS, **REMOTE, "remote_mode": "local"}, "compressor", {"remote_mode": "auto"}),
    ({"mode": "offloaded"}, "mode", DRAFTS),
    ({"fold": 3}, "fold", DRAFTS),
    ({"on_compressor_error": "fail"}, "on_compressor_error", DRAFTS),
    ({"require_conformant": True}, "require_conformant", DRAFTS),
    ({"audit_every": 3}, "audit_every", DRAFTS),
    ({"window": 3}, "window", DRAFTS),
    ({"window": 3}, "window", {"proposer": "ngram"}),
    ({**DRAFTS, "mode": "plain", "window": 3}, "window", {"mode": "auto"}),
    ({**DRAFTS, "mode": "offloaded", "full_kv": "device"}, "mode", {"full_kv": "host"}),
    ({**DRAFTS, "mode": "pinned", "full_kv": "host"}, "full_kv", {"mode": "auto"}),
    ({**DRAFTS, "mode": "plain", "full_kv": "disk"}, "full_kv", {"mode": "offloaded"}),
    ({"full_kv": "disk"}, "full_kv", DRAFTS),
    ({**DRAFTS, "full_kv": "device", "ring_layers": 3}, "ring_layers", {"full_kv": "host"}),
    ({**DRAFTS, "full_kv": "device", "link_bytes_per_s": 1e9}, "link_bytes_per_s", {"full_kv": "disk"}),
    ({**DRAFTS, "mode": "pinned", "on_swap_error": "fail"}, "on_swap_error", {"mode": "offloaded"}),
    ({**DRAFTS, "full_kv": "device", "link_bytes_per_s": 1e9}, "link_bytes_per_s", {"window": "auto"}),  # costs are of it
    ({**DRAFTS, **REMOTE, "link_bytes_per_s": 1e9}, "link_bytes_per_s", {"remote_mode": "auto"}),
    ({**DRAFTS, **REMOTE, "host_budget": 9}, "host_budget", {"full_kv": "host", "remote": None}),
    ({**DRAFTS, **REMOTE, "disk_budget": 9}, "disk_budget", {"full_kv": "disk", "remote": None}),
    ({**DRAFTS, "full_kv": "disk", "host_budget": 9}, "host_budget", {"full_kv": "host"}),
    ({**DRAFTS, "full_kv": "host", "disk_budget": 9}, "disk_budget", {"full_kv": "disk"}),
    ({**DRAFTS, "full_kv": "host", "swap_dir": "/x"}, "swap_dir", {"full_kv": "disk"}),
    ({**DRAFTS, "full_kv": "host", "swap_dir": "/x"}, "swap_dir", {"window": "auto"}),  # what a file costs is measured
    ({**DRAFTS, "calibration": "c.json"}, "calibration", {"mode": "auto"}),
    ({**DRAFTS, "calibration": "c.json"}, "calibration", {"window": "auto"}),
    ({**DRAFTS, **REMOTE, "calibration": "c.json"}, "calibration", {"remote_mode": "auto"}),
    ({**DRAFTS, "assistant": "demo"}, "assistant", {"proposer": "assistant"}),
    ({"tenant": "x"}, "tenant", {"prefix_store": "shm://x"}),
    ({**DRAFTS, "remote_mode": "auto"}, "remote_mode", REMOTE),
    ({**DRAFTS, "remote_token_file": "t"}, "remote_token_file", REMOTE),
    ({**DRAFTS, "remote_ca": "a.pem"}, "remote_ca", REMOTE),
    ({**DRAFTS, "remote_ca": "a.pem", "remote_cert": "c.pem", "remote_key": "k.pem"}, "remote_cert", REMOTE),
    ({**DRAFTS, "remote_ca": "a.pem", "remote_cert": "c.pem", "remote_key": "k.pem"}, "remote_key", REMOTE),
    ({**DRAFTS, "remote_plaintext": True}, "remote_plaintext", REMOTE),
    ({**DRAFTS, "remote_timeout": 3.0}, "remote_timeout", REMOTE),
    ({**DRAFTS, "remote_prefix_bytes": 9}, "remote_prefix_bytes", REMOTE),
    ({**DRAFTS, "on_remote_error": "fail"}, "on_remote_error", REMOTE),
    ({**DRAFTS, "pack_weights": "always", "device": "cuda:1"}, "pack_weights", {"device": "cpu"}),
]


@pytest.mark.parametrize(("settings", "message"), CLASHING)
def test_a_contradiction_is_an_error_with_cause_and_hint(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**settings)
    assert caught.value.message == message
    assert caught.value.cause
    assert caught.value.hint


def test_every_contradiction_has_a_case() -> None:
    covered = {next(clash for clash in CLASHES if clash.holds(_unchecked(settings))) for settings, _ in CLASHING}
    assert covered == set(CLASHES)


@pytest.mark.parametrize(("settings", "idle", "change"), IDLING)
def test_a_setting_that_does_nothing_is_told_and_one_that_does_something_is_not(
    settings: dict[str, Any], idle: str, change: dict[str, Any]
) -> None:
    config = EngineConfig(**settings)
    found = without_effect(config, settings, fixed=True)
    assert idle in found
    assert "{" not in found[idle]
    changed = {**settings, **change}
    assert idle not in without_effect(EngineConfig(**changed), changed, fixed=True)


def test_every_rule_and_every_name_in_it_has_a_case() -> None:
    covered = {
        (at, idle)
        for settings, idle, _ in IDLING
        for at, rule in enumerate(IDLE)
        if idle in rule.names and rule.holds(Uses(EngineConfig(**settings), fixed=True))
    }
    assert covered == {(at, name) for at, rule in enumerate(IDLE) for name in rule.names}


def test_requests_that_may_name_a_compressor_use_what_compressors_use() -> None:
    settings: dict[str, Any] = {
        "window": 4,
        "fold": 3,
        "full_kv": "disk",
        "ring_layers": 3,
        "swap_dir": "/x",
        "mode": "offloaded",
    }
    assert without_effect(EngineConfig(**settings), settings) == {}
    assert set(without_effect(EngineConfig(**settings), settings, fixed=True)) == set(settings)


SERVING: Final[list[dict[str, Any]]] = [
    # what a store, a drafter or a calibration may be given, though one `generate` makes nothing of it
    {**DRAFTS, "mode": "plain", "on_compressor_error": "fail"},
    {"compressor": "kivi", "options": {"bits": 2}, "mode": "plain"},
    {"mode": "plain", "full_kv": "disk", "ring_layers": 3, "link_bytes_per_s": 1e9, "on_swap_error": "fail", "swap_dir": "/x"},
    {"mode": "plain", "full_kv": "disk", "disk_budget": 9},
    {"full_kv": "device", "ring_layers": 3, "link_bytes_per_s": 1e9, "host_budget": 9},
    {"mode": "pinned", "full_kv": "host", "swap_dir": "/x"},
    {"remote_mode": "auto", "remote_token_file": "t", "remote_timeout": 3.0, "calibration": "c.json"},
    {**REMOTE, "remote_mode": "verify", "proposer": "assistant", "assistant": "demo"},  # after the link has failed
]


@pytest.mark.parametrize("settings", SERVING)
def test_a_file_is_not_told_of_what_a_store_or_a_drafter_uses(settings: dict[str, Any]) -> None:
    assert without_effect(EngineConfig(**settings), settings) == {}


SAMPLES: Final[dict[str, Any]] = {
    "compressor": "random",
    "keep": 0.5,
    "keep_tokens": 9,
    "options": {"a": 1},
    "identity": "token",
    "window": "auto",
    "full_kv": "disk",
    "proposer": "ngram",
    "assistant": "demo",
    "mode": "pinned",
    "scheduler": "lockstep",
    "device_budget": 9,
    "host_budget": 9,
    "disk_budget": 9,
    "max_running": 9,
    "max_queue": 9,
    "calibration": "c.json",
    "dtype": "float32",
    "rows": 16,
    "shapes": "one",
    "pack_weights": "always",
    "fuse": "never",
    "graphs": "never",
    "device": "cuda",
    "threads": 1,
    "ring_layers": 3,
    "link_bytes_per_s": 1e9,
    "swap_dir": "/x",
    "tenant": "x",
    "prefix_store": "shm://x",
    "fold": 3,
    "max_model_len": 9,
    "on_compressor_error": "fail",
    "on_swap_error": "fail",
    "remote": "localhost:7000",
    "remote_mode": "auto",
    "remote_token_file": "t",
    "remote_ca": "a.pem",
    "remote_cert": "c.pem",
    "remote_key": "k.pem",
    "remote_plaintext": True,
    "remote_timeout": 3.0,
    "remote_prefix_bytes": 9,
    "on_remote_error": "fail",
    "probe": False,
    "attention": "numba",
    "audit_every": 3,
    "require_conformant": True,
    "disable_plugins": ("x",),
}


def test_any_two_settings_are_refused_or_their_idle_ones_told() -> None:
    assert set(SAMPLES) == set(option_fields(EngineConfig))
    refused, told = set(), set()
    for pair in itertools.combinations(SAMPLES, 2):
        settings = {name: SAMPLES[name] for name in pair}
        try:
            config = EngineConfig(**settings)
        except ConfigError:
            refused.add(frozenset(pair))
        else:
            told |= set(without_effect(config, settings, fixed=True))
    assert frozenset({"full_kv", "mode"}) in refused
    assert frozenset({"identity", "prefix_store"}) in refused
    assert told >= {"host_budget", "tenant", "assistant", "calibration", "swap_dir", "remote_mode", "remote_timeout"}


def test_generate_tells_what_does_nothing_and_refuses_what_contradicts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "-m", "/none", "--mode", "pinned", "--full-kv", "disk", "hello"]) == 2
    assert "mode=pinned and full_kv=disk exclude each other (pinned keeps" in capsys.readouterr().err
    assert cli.main(["generate", "-m", "/none", "--mode", "offloaded", "--tenant", "x", "hello"]) != 0
    told = capsys.readouterr().err
    assert "warning: mode (arguments) has no effect: no compressor is named, so nothing drafts" in told
    assert "warning: tenant (arguments) has no effect: it is of the prefix store, and there is none" in told


def test_a_file_is_told_what_does_nothing_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "v.toml"
    file.write_text('compressor = "random"\nkeep = 0.5\nmode = "plain"\nring_layers = 3\nwindow = 3\n')
    assert cli.main(["config", "validate", "--json", str(file)]) == 0
    assert json.loads(capsys.readouterr().out)["without_effect"] == {
        "window": "nothing drafts, with neither a compressor nor a proposer at work"
    }
    assert cli.main(["config", "show", "--config", str(file)]) == 0
    assert f"warning: window (file {file}) has no effect" in capsys.readouterr().err


MEASURE: Final = ["bench", "throughput", "-m", "/none"]


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["bench", "throughput", "--render", "x", "--context", "100"], "--context has no effect (--render measures nothing)"),
        (["bench", "throughput", "--render", "x", "--lines", "y"], "--lines has no effect (--render measures nothing)"),
        (["bench", "throughput", "--render", "x", "--set", "rows=8"], "--set has no effect"),
        ([*MEASURE, "--systems", "auto", "--window", "4"], "--window has no effect (of the systems only vericache"),
        ([*MEASURE, "--systems", "ngram", "-c", "random"], "--compressor has no effect (none of the systems"),
        ([*MEASURE, "--peer-timeout", "9"], "--peer-timeout has no effect (no --peer is asked)"),
        ([*MEASURE, "--threads", "1", "--set", "threads=2"], "--set threads: it is given with --threads"),
        ([*MEASURE, "--set", "full_kv=remote"], "--set full_kv: it is given with --full-kv"),
        ([*MEASURE, "--set", "device_budget=9"], "--set device_budget: each workload has a cap"),
        ([*MEASURE, "--set", "keep=0.5"], "--set keep: what a compressor keeps is given with -c"),
        ([*MEASURE, "--set", "compressor=x"], "--set compressor: compressors are named with -c"),
        ([*MEASURE, "--set", "mode=pinned", "--full-kv", "disk"], "mode=pinned and full_kv=disk exclude each other"),
        (
            [*MEASURE, "--systems", "auto", "--set", "window=4"],
            "--set window has no effect (of the systems only vericache, lock",
        ),
        (
            [*MEASURE, "--systems", "vericache", "--window", "4", "--set", "window=4"],
            "(of the systems only lockstep, ngram take",
        ),
        (
            [*MEASURE, "--systems", "auto,ngram", "--set", "mode=pinned"],
            "--set mode has no effect (of the systems only vericache",
        ),
        ([*MEASURE, "--systems", "lockstep", "--set", "scheduler=staggered"], "--set scheduler has no effect"),
        ([*MEASURE, "--systems", "lossy", "--set", "proposer=ngram"], "--set proposer has no effect"),
        (["simulate", "--ring", "0", "--background"], "--background has no effect (without --ring"),
        (["simulate", "--ring", "0", "--no-background"], "--no-background has no effect"),
        (
            ["simulate", "--scheduler", "lockstep", "--background", "--ring", "2"],
            "(--scheduler lockstep verifies all together)",
        ),
        (["simulate", "--mode", "plain", "--keep", "0.5"], "--keep has no effect (--mode plain drafts nothing)"),
        (["simulate", "--mode", "plain", "--ring", "2"], "--ring has no effect (--mode plain"),
        (["simulate", "--mode", "plain", "--hazard", "0.3"], "--hazard has no effect (--mode plain drafts nothing)"),
        (["simulate", "--drafters", "2", "--scatter"], "--scatter has no effect (no two requests have one prompt)"),
        (
            ["simulate", "--count", "2", "--calibration", "x", "--kv-memory", "9"],
            "--count has no effect (--calibration has the costs and --kv-memory the room)",
        ),
        (["simulate", "--mode", "pinned", "--tier", "disk"], "--tier has no effect (--mode pinned swaps nothing)"),
        (["simulate", "--tier", "disk", "--host-memory", "9"], "--host-memory has no effect (--tier disk"),
        (["simulate", "--hazard-turn", "9"], "--hazard-turn has no effect (--hazard has no slash"),
        (["simulate", "--slow-link", "3"], "--slow-link has no effect (it is of the remote scenario"),
        (["simulate", "--drafters", "2", "--scheduler", "lockstep"], "--scheduler has no effect (the remote scenario"),
        (["simulate", "--drafters", "2", "--search-windows"], "--search-windows has no effect (the remote scenario"),
        (["simulate", "--compare", "x", "--mode", "plain"], "--mode has no effect (--compare simulates what its file"),
    ],
)
def test_flags_that_do_nothing_are_refused(argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    assert reason in capsys.readouterr().err


def _unchecked(settings: dict[str, Any]) -> EngineConfig:
    """A configuration with ``settings`` that nothing has looked at."""
    config = replace(EngineConfig())
    for name, value in settings.items():
        object.__setattr__(config, name, value)
    return config
