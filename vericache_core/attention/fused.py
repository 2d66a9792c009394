"""Whether a fused kernel can attend to codes as they are stored, and the door to it; imports no Triton by itself."""

from __future__ import annotations

import importlib.util
import logging
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vericache_core.attention.online import AttentionState

if TYPE_CHECKING:
    from vericache_core.coded import CodedRows

log = logging.getLogger("vericache.attention")


def fold_fused(query: Tensor, state: AttentionState, keys: CodedRows, values: CodedRows, *, exact: bool = True) -> bool:
    """Fold ``keys`` and ``values`` into ``state`` without decoding them; False, doing nothing, where that cannot be done.

    It can on CUDA devices with Triton, for codecs that have a ``layout``. The arguments are those of
    :func:`vericache_core.attention.triton_codes.fold_codes`: ``query [heads, rows, head_dim]`` float32, scaled;
    ``exact=False`` leaves out the exact rows after the codes.
    """
    if keys.codec.layout is None or values.codec.layout is None or not runs_on(query.device):
        return False
    from vericache_core.attention.triton_codes import fold_codes

    fold_codes(query, state, keys, values, exact=exact)
    return True


def runs_on(device: torch.device) -> bool:
    """Whether Triton kernels are used there: on CUDA devices, if one can be launched."""
    return device.type == "cuda" and have_triton() and _launches(device)


@cache
def have_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


@cache
def _launches(device: torch.device) -> bool:
    """Try the smallest kernel: Triton builds its launcher with a C compiler, which a machine may lack."""
    from vericache_core.attention.triton_bits import pack_triton

    try:
        pack_triton(torch.zeros(8, dtype=torch.uint8, device=device), 1)
    except Exception as error:  # noqa: BLE001 (whatever it is, there is another way to attend)
        log.warning("Triton cannot run a kernel on %s (%s: %s)", device, type(error).__name__, error)
        return False
    return True
