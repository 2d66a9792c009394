"""The GPU benchmark says what it needs, and its checks run in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.py"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env={**inherited, **environment}, capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_a_gpu_it_says_so() -> None:
    done = run()
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr
    assert not done.stdout


@pytest.mark.slow
def test_the_checks_pass_in_the_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    done = run("--device", "cpu", "--checks", "--json", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["kernel_comparisons"] >= 22
    assert all(record["identical"] for record in report["engines"])
