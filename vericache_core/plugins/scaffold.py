"""``vericache plugins new``: write a plugin project that passes the conformance suite as it is."""

from __future__ import annotations

import importlib.resources
import tempfile
from pathlib import Path
from string import Template
from typing import Final

from vericache_core._version import __version__
from vericache_core.errors import UsageError
from vericache_core.plugins.discovery import BUILTINS
from vericache_core.plugins.spec import API_VERSION, is_valid_name

KINDS: Final = ("token-drop", "quantization")
_DETAILS: Final = {
    "token-drop": {
        "first": "score",
        "summary": "keeps the tokens whose keys stand out",
        "option_sets": '{"window": 4, "sinks": 0, "keep": 0.5}',
    },
    "quantization": {
        "first": "RowCodec",
        "summary": "codes of a few bits, newest tokens exact",
        "option_sets": '{"bits": 2, "residual": 8}, {"bits": 8}',
    },
}


def project_files(name: str, kind: str) -> dict[str, str]:
    """Return the files of a project by path.

    Raises UsageError for a name or kind that is not legal.
    """
    if not is_valid_name(name):
        raise UsageError(f"{name!r} is not a compressor name", hint="use lower-case words joined by single hyphens")
    if name in BUILTINS:
        raise UsageError(f"{name!r} is the name of a compressor inside the core", hint="choose another")
    if kind not in KINDS:
        raise UsageError(f"unknown kind {kind!r}", hint=f"kinds: {', '.join(KINDS)}")
    words = name.split("-")
    module = f"vericache_compressor_{name.replace('-', '_')}"
    major, minor = __version__.split(".")[:2]
    values = {
        "name": name,
        "kind": kind,
        "module": module,
        "cls": "".join(word.capitalize() for word in words),
        "title": " ".join(word.capitalize() for word in words),
        "api": str(API_VERSION),
        "core": f"{major}.{minor}",
        "next": str(int(major) + 1),
        **_DETAILS[kind],
    }
    source = f"src/{module}"
    templates = {
        "pyproject.toml": "common/pyproject.toml",
        "README.md": "common/README.md",
        "conformance.toml": "common/conformance.toml",
        ".gitignore": "common/gitignore",
        ".github/workflows/test.yml": "common/ci.yml",
        "tests/test_conformance.py": "common/test.py",
        f"{source}/__init__.py": "common/init.py",
        f"{source}/plugin.py": "common/plugin.py",
        f"{source}/options.py": f"{kind}/options.py",
        f"{source}/compressor.py": f"{kind}/compressor.py",
    }
    root = importlib.resources.files("vericache_core.plugins") / "templates"
    made = {path: Template((root / f"{found}.tmpl").read_text("utf-8")).substitute(values) for path, found in templates.items()}
    return {**made, f"{source}/py.typed": ""}


def write_project(name: str, kind: str, folder: Path) -> list[str]:
    """Write the project into ``folder``, which must not exist or be empty; return the paths written.

    The project appears whole or not at all. Raises UsageError when it cannot be written.
    """
    files = project_files(name, kind)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{str(folder)!r} exists and is not an empty folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as room:
            made = Path(room) / "project"
            for path, text in files.items():
                target = made / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text, encoding="utf-8")
            if folder.exists():
                folder.rmdir()
            made.rename(folder)
    except OSError as error:
        raise UsageError(f"{str(folder)!r} cannot be written", cause=error.strerror) from error
    return sorted(files)
