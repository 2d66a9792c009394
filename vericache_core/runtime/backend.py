"""Which attention implementation an engine uses; one for its whole life, because bits differ between them."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from vericache_core.attention.fused import have_triton, runs_on
from vericache_core.attention.paged import attend_reference
from vericache_core.cache.move import HAVE_NUMBA
from vericache_core.errors import ConfigError, MissingDependencyError
from vericache_core.runtime.tile import AttendFunction

log = logging.getLogger("vericache.runtime")


def choose_attention(name: str, device: torch.device) -> tuple[str, AttendFunction]:
    """``(name, function)`` for ``auto``, ``reference``, ``numba`` or ``triton``.

    Raises:
        ConfigError, MissingDependencyError: ``numba`` or ``triton`` asked for where it cannot run.
    """
    if name == "auto":
        name = _fastest(device)
    if name == "numba":
        if device.type != "cpu":
            raise ConfigError("attention='numba' runs on CPU only", cause=f"the model is on {device}")
        if not HAVE_NUMBA:
            raise MissingDependencyError("attention='numba' needs Numba", hint="pip install 'vericache[cpu]'")
        from vericache_core.attention.numba_kernel import attend_numba

        return name, attend_numba
    if name == "triton":
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ConfigError("attention='triton' runs on CUDA devices only", cause=f"the model is on {device}")
        if not have_triton():
            raise MissingDependencyError("attention='triton' needs Triton", hint="pip install 'vericache[gpu]'")
        from vericache_core.attention.triton_paged import attend_triton

        return name, attend_triton
    return "reference", attend_reference


def set_threads(threads: int) -> None:
    """Let this process compute with ``threads`` CPU threads, in torch and, where it is installed, in Numba."""
    torch.set_num_threads(threads)
    if HAVE_NUMBA:
        import numba

        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))


def _fastest(device: torch.device) -> str:
    """What ``auto`` stands for on ``device``."""
    if runs_on(device):
        return "triton"
    if device.type == "cpu" and HAVE_NUMBA:
        return "numba"
    extra = {"cpu": "cpu", "cuda": "gpu"}.get(device.type)
    if extra is not None:
        needed = {"cpu": "Numba", "gpu": "Triton"}[extra]
        log.warning(
            "%s is not installed or cannot run, attention takes the slow reference path; pip install 'vericache[%s]'",
            needed,
            extra,
        )
    return "reference"


def threads_may_overlap(attention: str, packed: bool) -> bool:
    """Whether two threads may compute at the same time: on Numba's workqueue threading layer they cannot.

    Args:
        attention: as chosen.
        packed: whether products are packed, which may be Numba's too.
    """
    if attention != "numba" and not (packed and HAVE_NUMBA):
        return True
    import numba

    try:
        layer: Any = numba.threading_layer()
    except ValueError:  # nothing ran in parallel yet
        return False
    return layer in {"omp", "tbb"}
