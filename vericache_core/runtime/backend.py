"""Which attention implementation an engine uses; one for its whole life, because bits differ between them."""

from __future__ import annotations

import logging

import torch

from vericache_core.attention.paged import attend_reference
from vericache_core.cache.move import HAVE_NUMBA
from vericache_core.errors import ConfigError, MissingDependencyError
from vericache_core.runtime.tile import AttendFunction

log = logging.getLogger("vericache.runtime")


def choose_attention(name: str, device: torch.device) -> tuple[str, AttendFunction]:
    """``(name, function)`` for ``auto``, ``reference`` or ``numba``.

    Raises:
        ConfigError, MissingDependencyError: ``numba`` asked for where it cannot run.
    """
    if name == "numba" and device.type != "cpu":
        raise ConfigError("attention='numba' runs on CPU only", cause=f"the model is on {device}")
    if name == "numba" and not HAVE_NUMBA:
        raise MissingDependencyError("attention='numba' needs Numba", hint="pip install 'vericache[cpu]'")
    if name == "reference" or device.type != "cpu":
        return "reference", attend_reference
    if not HAVE_NUMBA:
        log.warning("Numba is not installed, attention takes the slow reference path; pip install 'vericache[cpu]'")
        return "reference", attend_reference
    from vericache_core.attention.numba_kernel import attend_numba

    return "numba", attend_numba
