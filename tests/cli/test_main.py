from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vericache_core._version import __version__
from vericache_core.cli import main as cli
from vericache_core.cli.output import color_enabled
from vericache_core.errors import ConfigError, PluginLoadError

ROOT = Path(__file__).parents[2]
Command = Callable[[Callable[[Any], int]], None]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    """Install a command named ``fake`` that runs a given function."""

    def install(run: Callable[[Any], int]) -> None:
        module = types.ModuleType("vericache_core.cli.fake")
        vars(module).update(add_arguments=lambda parser: parser.add_argument("--number", type=int), run=run)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(cli.COMMANDS, "fake", "for tests")

    monkeypatch.delenv("VERICACHE_DEBUG", raising=False)
    return install


def raising(error: BaseException) -> Callable[[Any], int]:
    def run(args: Any) -> int:
        raise error

    return run


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--help"]):
        assert cli.main(argv) == 0
        out = capsys.readouterr().out
        assert all(f"  {name} " in out for name in cli.COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"vericache {__version__}\n"


@pytest.mark.parametrize(
    "argv",
    [["--help"], ["--version"], ["plugins", "list"], ["plugins", "list", "--json"], ["config", "show"], ["config", "schema"]],
)
def test_quick_answers_import_nothing_heavy(argv: list[str]) -> None:
    """A test of time would be flaky; these imports are what would make it slow."""
    code = (
        f"import sys; from vericache_core.cli.main import main; code = main({argv!r})\n"
        "heavy = [m for m in ('torch', 'transformers', 'numpy', 'pluggy') if m in sys.modules]\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


@pytest.mark.parametrize(
    ("argv", "reason", "hint"),
    [
        (["plugin"], "unknown command 'plugin'; did you mean 'plugins'?", "commands:"),
        (["--nonsense"], "unrecognized arguments: --nonsense", "vericache --help"),
        (["plugins"], "required", "vericache plugins --help"),
        (["plugins", "lst"], "invalid choice: 'lst'", "vericache plugins --help"),
        (
            ["plugins", "list", "--jso"],
            "arguments: --jso; did you mean '--json'?",
            "vericache plugins list --help",
        ),
    ],
)
def test_usage_errors_are_one_line_and_a_hint(
    argv: list[str], reason: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    error, second = captured.err.splitlines()
    assert error.startswith("vericache: error: ")
    assert reason in error
    assert second.startswith("hint: ")
    assert hint in second


def test_our_errors_give_their_exit_code_cause_and_hint(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    command(raising(ConfigError("no\ngood", cause="a\nb", hint="do this")))
    assert cli.main(["fake"]) == 2
    assert capsys.readouterr().err == "vericache: error: no good (a b)\nhint: do this\n"
    command(raising(PluginLoadError("broken")))
    assert cli.main(["fake"]) == 1
    assert capsys.readouterr().err == "vericache: error: broken\n"


def test_a_bug_is_reported_and_debug_shows_the_traceback(
    command: Command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command(raising(ZeroDivisionError("oops")))
    assert cli.main(["fake"]) == 1
    err = capsys.readouterr().err
    assert "internal error: ZeroDivisionError: oops" in err
    assert "VERICACHE_DEBUG=1" in err
    assert "Traceback" not in err
    monkeypatch.setenv("VERICACHE_DEBUG", "1")
    assert cli.main(["fake"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_the_commands_own_exit_code_and_arguments(command: Command) -> None:
    command(lambda args: int(args.number))
    assert cli.main(["fake", "--number", "5"]) == 5


def test_ctrl_c_says_so_and_exits_130(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    command(raising(KeyboardInterrupt()))
    assert cli.main(["fake"]) == 130
    assert capsys.readouterr().err == "vericache: interrupted\n"


def test_warnings_look_like_every_other_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("VERICACHE_WINDW", "3")
    for _ in range(2):  # not twice in one run, however often main is called
        assert cli.main(["config", "show", "--json"]) == 0
        err = capsys.readouterr().err
        assert err.startswith("vericache: warning: ignored environment variable VERICACHE_WINDW")
        assert err.count("\n") == 1


def test_python_dash_m_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "vericache_core", "--version"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"vericache {__version__}\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("argv", [["config", "schema"], ["plugins", "list"], ["--version"]])
def test_a_closed_pipe_is_quiet(unbuffered: str, argv: list[str]) -> None:
    """Whether it is noticed while writing or only when the buffer is flushed at the end."""
    code = f"import sys; sys.stdin.read()\nfrom vericache_core.cli.main import main; sys.exit(main({argv!r}))"
    pipe, env = subprocess.PIPE, os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe, cwd=ROOT, env=env) as child:
        assert child.stdin
        assert child.stdout
        assert child.stderr
        child.stdout.close()
        child.stdin.close()  # only now does it write
        assert child.stderr.read() == b""
        # argparse swallows the error when it writes --version unbuffered itself
        assert child.wait() == (0 if unbuffered and argv == ["--version"] else 141)


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal: Any = types.SimpleNamespace(isatty=lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert color_enabled(terminal)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not color_enabled(terminal)
    monkeypatch.delenv("NO_COLOR")
    assert not color_enabled(types.SimpleNamespace(isatty=lambda: False))  # type: ignore[arg-type]  # enough of a stream


def test_a_flag_that_is_none_names_the_nearest_and_not_its_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--devise", "cpu", "hello"]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error == "vericache: error: unrecognized arguments: --devise; did you mean '--device'?"
    assert hint == "hint: vericache generate --help"
    assert cli.main(["bench", "throughput", "--repaets=3"]) == 2
    assert "--repaets; did you mean '--repeats'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["/no/such/model", "./nosuch", "~/nosuch/model"])
def test_a_folder_that_is_not_there_is_no_hub_id(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "-m", name, "hello"]) == 2
    assert f"model folder {name!r} does not exist" in capsys.readouterr().err


def test_a_device_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["generate", "--device", "cuda:1", "hello"]) == 2
    assert "device=cuda:1: torch finds no CUDA device here" in capsys.readouterr().err


def test_a_swap_folder_that_is_not_there_is_told_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["generate", "-m", "/no/such/model", "-c", "identity", "--full-kv", "disk", "--swap-dir", "/no/such/folder", "hello"]
    assert cli.main(argv) == 1
    assert "no swap file in /no/such/folder" in capsys.readouterr().err
