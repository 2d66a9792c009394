"""Where a run took place: versions, machine, threads. In every report and passport."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from vericache_conform._version import __version__
from vericache_core._version import __version__ as core_version
from vericache_core.plugins.spec import API_VERSION


def run_facts(seed: int, model: str) -> dict[str, Any]:
    """Versions, platform and settings, in JSON types."""
    return {
        "suite": __version__,
        "core": core_version,
        "api_version": API_VERSION,
        "python": platform.python_version(),
        "platform": f"{platform.system()}-{platform.machine()}".lower(),
        "packages": {name: _version(name) for name in ("torch", "transformers", "numpy", "hypothesis", "numba")},
        "device": "cpu",
        "dtypes": ["float32", "bfloat16", "float16"],
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
        "seed": seed,
        "model": model,
        "git": _git(Path.cwd()),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(folder: Path) -> str | None:
    """Commit of the working directory, with ``+changes`` where it is not clean; None outside a repository."""
    try:
        commands = (["git", "rev-parse", "--short", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"])
        commit, status = (
            subprocess.run(  # noqa: S603  # fixed arguments
                command, cwd=folder, capture_output=True, text=True, timeout=10, check=True
            ).stdout.strip()
            for command in commands
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+changes" if status else "")
