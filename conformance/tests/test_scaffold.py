"""``vericache plugins new``: what it writes is a plugin that passes as it is."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from vericache_conform.catalogue import select
from vericache_conform.execute import Settings, execute
from vericache_conform.subject import resolve
from vericache_core.cli.main import main
from vericache_core.errors import UsageError
from vericache_core.plugins.scaffold import KINDS, project_files, write_project
from vericache_core.plugins.testing import on_path, write_distribution

ROOT = Path(__file__).parents[2]
IN_A_PROCESS = {"S-02", "S-03", "S-05", "S-06", "S-07", "C-07", "C-09"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_project_passes_the_contract_as_it_is(kind: str, tmp_path: Path) -> None:
    name = f"fresh-{kind}"
    module = f"vericache_compressor_{name.replace('-', '_')}"
    write_project(name, kind, tmp_path / "project")
    source = tmp_path / "project" / "src"
    write_distribution(source, f"vericache-compressor-{name}", {name: f"{module}.plugin"})
    with on_path(source):
        subject = resolve(name)
        checks = [check for check in select(["static", "contract"]) if check.id not in IN_A_PROCESS]
        results = [execute(check, subject, Settings()) for check in checks]
    bad = [f"{r.check}: {r.message}" for r in results if r.bad or (r.outcome == "skip" and not r.declared)]
    assert bad == []
    assert len([r for r in results if r.outcome == "pass"]) > 20


def test_the_files_of_a_project() -> None:
    files = project_files("my-method", "token-drop")
    for path in ("pyproject.toml", "README.md", "conformance.toml", "tests/test_conformance.py", ".github/workflows/test.yml"):
        assert files[path]
    assert "class MyMethod(TokenDropCompressor)" in files["src/vericache_compressor_my_method/compressor.py"]
    assert "${{ matrix.python }}" in files[".github/workflows/test.yml"]
    assert not [path for path, text in files.items() if "$name" in text or "$module" in text]


@pytest.mark.parametrize("name", ["My-Method", "a--b", "identity", "9lives", ""])
def test_names_that_cannot_be_used_are_refused(name: str) -> None:
    with pytest.raises(UsageError):
        project_files(name, "token-drop")


def test_the_command_writes_once_and_does_not_overwrite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "deep" / "project"
    assert main(["plugins", "new", "mine", "--folder", str(folder)]) == 0
    assert str(folder / "pyproject.toml") in capsys.readouterr().out
    assert [path.name for path in folder.parent.iterdir()] == ["project"]
    before = sorted(folder.rglob("*"))
    assert main(["plugins", "new", "mine", "--folder", str(folder)]) == 2
    assert "is not an empty folder" in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_in_a_clean_environment(kind: str, tmp_path: Path) -> None:
    """Generate, install into an environment of its own, run pytest and the suite there, and find it in the listing."""
    name = f"fresh-{kind}"
    write_project(name, kind, tmp_path / "project")
    # Torch and transformers come from here: installing them again would take minutes and a network.
    venv.create(tmp_path / "env", system_site_packages=False)
    python = tmp_path / "env" / "bin" / "python"
    found = subprocess.run(
        [python, "-c", "import site; print(site.getsitepackages()[0])"], capture_output=True, text=True, check=True
    )
    here = [entry for entry in sys.path if entry.endswith("site-packages")]
    Path(found.stdout.strip(), "borrowed.pth").write_text("\n".join(here) + "\n")
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-build-isolation"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("VERICACHE_")}
    for target in (ROOT, ROOT / "conformance", tmp_path / "project"):
        subprocess.run([*install, str(target)], check=True, env=environment)

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [python, *arguments], capture_output=True, text=True, cwd=tmp_path / "project", env=environment, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "failed" not in run("-m", "pytest", "-q").splitlines()[-1]
    command = ("-m", "vericache_conform.cli.main", "run", name, "--level", "certified", "--passport")
    assert f"{name}: certified" in run(*command)
    assert f"{name}" in run("-m", "vericache_core", "plugins", "list")
    line = next(line for line in run("-m", "vericache_core", "plugins", "list").splitlines() if line.startswith(name))
    assert "conformant" in line
