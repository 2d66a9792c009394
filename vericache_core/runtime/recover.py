"""What becomes of a request when a plugin or a tier fails: it goes on more slowly, with the same tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from vericache_core.blame import raised_at
from vericache_core.cache.full import FullKV
from vericache_core.errors import CompressorFault, SwapError, VeriCacheError, describe
from vericache_core.runtime.compress import Compression
from vericache_core.runtime.request import Request
from vericache_core.runtime.tile import StepFault

log = logging.getLogger("vericache.runtime")
MAX_RECOVERIES: Final = 3
"""Times a request's full KV is recomputed after swap failures before the request fails."""


class Recovery:
    """Degrades requests at fault.

    Args:
        make_full: builds an empty full KV for a request that starts over.
        compression: is to see the prefill of such a request again.
        on_compressor_error: ``"plain"`` or ``"fail"``.
        on_swap_error: ``"recompute"`` or ``"fail"``.
    """

    def __init__(
        self,
        make_full: Callable[[Request], FullKV],
        compression: Compression,
        on_compressor_error: str = "plain",
        on_swap_error: str = "recompute",
    ) -> None:
        self._make_full, self._compression = make_full, compression
        self._on_compressor_error, self._on_swap_error = on_compressor_error, on_swap_error

    def step_failed(self, fault: StepFault) -> None:
        """Nothing of a failed step counts; the request at fault is degraded, the others just run again."""
        request, error = fault.request, fault.error
        if request.full.unwanted:
            request.output.close("cancelled")
            return
        if isinstance(error, CompressorFault):
            self.compressor_failed(request, "attend", error)
            return
        if self._on_swap_error == "fail" or request.recoveries >= MAX_RECOVERIES:
            request.fail(error)
            return
        request.recoveries += 1
        # As text: a handler that keeps its records would keep the traceback, and with it the tensors of its frames.
        text = "request %d: %s; recomputing its full KV"
        log.warning(text, request.number, str(error), extra={"request": request.number})
        request.metrics.degraded.append(f"full KV recomputed: {error}")
        self.start_over(request)
        if not request.finished:
            request.full.make_room(request.greatest_length)

    def compressor_failed(self, request: Request, where: str, error: Exception) -> None:
        """A compressor raised ``error`` in ``where``: decode plainly from here on, unless it was a tier that failed."""
        name = request.metrics.compressor
        cause = describe(error.error if isinstance(error, StepFault) else error) + raised_at(error)
        if isinstance(error, StepFault) and isinstance(error.error, SwapError):
            self.step_failed(error)
            return
        if isinstance(error, SwapError):
            self.step_failed(StepFault(request, error))
            return
        request.forget_draft()
        request.compressor = None
        if self._on_compressor_error == "fail":
            request.fail(CompressorFault(f"compressor {name!r} failed in {where}", cause=cause))
            return
        text = "request %d: compressor %r failed in %s (%s); decoding plainly"
        log.warning(text, request.number, name, where, cause, extra={"request": request.number})
        request.metrics.degraded.append(f"compressor failed in {where}: {cause}")

    def start_over(self, request: Request) -> None:
        """Drop all caches; the tokens stay, and a prefill computes their rows again."""
        request.metrics.swap_bytes += request.full.moved_bytes
        request.metrics.offload_bytes += request.full.offloaded_bytes
        request.forget_draft()
        request.full.close()
        request.proposals.close()
        request.link_counted = (0.0, 0, 0.0)
        try:
            request.full = self._make_full(request)
        except VeriCacheError as again:
            request.fail(again)
            return
        request.compress_at = len(request.tokens)  # the newest token is recomputed too: one prefill to the end
        self._compression.expect(request)
