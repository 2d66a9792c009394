"""Drafts from compressed KV, away from the verifier.

The drafter has the model's weights and, of each request, the compressed prefix and a tail of its own rows. It never holds
the full KV for longer than it takes to compress it, and never decides anything: it is told which tokens stand.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from vericache_core.context import CompressContext
from vericache_core.engine import Engine
from vericache_core.errors import CompressorFault, describe
from vericache_core.runtime.backend import choose_attention
from vericache_core.runtime.request import Request, Want
from vericache_core.runtime.sampling_params import SamplingParams
from vericache_core.runtime.segments import Segment
from vericache_core.runtime.tile import StepFault, TileAttention

log = logging.getLogger("vericache.vllm")
STEP_SHAPES = (2, 8, 32, 128)
"""Rows of a drafter's steps. Drafts may have any bits, so no probe has to allow them."""


class DraftSession(Protocol):
    """Drafts for one request."""

    def propose(self, committed: Sequence[int], count: int) -> list[int]:
        """At most ``count`` tokens to follow ``prompt + committed``.

        ``committed`` begins with what it was at the call before.

        Raises:
            VeriCacheError: this session cannot draft any more.
        """

    def close(self) -> None:
        """Give its memory back; safe to call twice."""


class Drafter(Protocol):
    """Makes sessions."""

    def open(self, prompt: Sequence[int]) -> DraftSession:
        """Prefill and compress ``prompt``, token ids.

        Raises:
            VeriCacheError: the prompt or the compressor is refused.
        """


class CompressedDrafter:
    """Drafts with any registered compressor.

    Args:
        engine: its configured compressor drafts. Its steps get shapes of their own, so leave it to the drafter.
    """

    def __init__(self, engine: Engine) -> None:
        if engine.config.compressor is None:
            raise CompressorFault("the drafter's engine has no compressor", hint="EngineConfig(compressor=...)")
        self.engine = engine
        engine.adapter.shapes = STEP_SHAPES

    @classmethod
    def from_pretrained(cls, model: str, compressor: str, **overrides: Any) -> CompressedDrafter:
        """Load ``model`` and draft with ``compressor``; ``overrides`` are further fields of ``EngineConfig``."""
        settings: dict[str, Any] = {"identity": "token", "probe": False, "rows": STEP_SHAPES[-1], **overrides}
        return cls(Engine.from_pretrained(model, compressor=compressor, **settings))

    def open(self, prompt: Sequence[int]) -> CompressedSession:
        engine = self.engine
        # Two tokens: with fewer the engine sees no use in compressing. They are not generated.
        job = engine.submit(list(prompt), SamplingParams(max_new_tokens=2, ignore_eos=True))
        request = next(request for request in engine.loop.requests if request.number == job.number)
        try:
            self._compress(request)
        except BaseException:
            job.cancel()
            raise
        engine.loop.release(request)
        return CompressedSession(engine, request)

    def _compress(self, request: Request) -> None:
        """Run steps until the prompt is compressed."""
        while request.draft is None:
            if request.finished or request.metrics.degraded:
                cause = str(request.error or "; ".join(request.metrics.degraded) or "the prompt was not compressed")
                raise CompressorFault(f"no drafts by {self.engine.config.compressor!r}", cause=cause)
            self.engine.step()


class CompressedSession:
    """See :class:`CompressedDrafter`; between calls the draft KV holds provisional rows of what was last drafted."""

    def __init__(self, engine: Engine, request: Request) -> None:
        assert request.draft is not None
        self.engine, self._request, self._draft = engine, request, request.draft
        self.compressed_bytes = request.metrics.compressed_kv_bytes
        self.full_bytes = request.metrics.compressed_from_bytes
        self._prompt = tuple(request.tokens[: request.prompt_tokens])
        self._first = request.generated[0]
        self._provisional: list[int] = []
        _, self._attend = choose_attention(engine.attention, engine.adapter.device)
        request.full.drop_offloaded()

    def propose(self, committed: Sequence[int], count: int) -> list[int]:
        self._settle(committed)
        self._fold()
        pending = list(committed[self._draft.tokens - len(self._prompt) :])
        drafts: list[int] = []
        if not pending:  # behind the bare prompt: prefill said what comes next, with the KV still full
            drafts = [self._first][:count]
            pending = list(drafts)
        while len(drafts) < count:
            logits = self._run(pending)
            drafts.append(self._request.chooser.draft(logits, [*committed, *drafts]))
            pending = drafts[-1:]
        return drafts

    def close(self) -> None:
        self._request.close()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless the caches agree on what they hold."""
        self._request.full.check_integrity()
        self._draft.check_integrity()
        assert self._draft.drafted == len(self._provisional)

    def _settle(self, committed: Sequence[int]) -> None:
        """Keep the provisional rows that became true, drop the others."""
        first = self._draft.prefix_tokens + self._draft.tail - len(self._prompt)
        kept = 0
        for ours, theirs in zip(self._provisional, committed[first:], strict=False):
            if ours != theirs:
                break
            kept += 1
        # The rows stay where they are: taking all back and counting the true ones in again moves nothing.
        self._draft.retract()
        self._request.full.advance(kept)
        self._draft.accept(kept)
        self._provisional = []

    def _fold(self) -> None:
        """Let the compressor take the tail in once it is long; token droppers keep it as it is."""
        fold, draft, compressor = self.engine.config.fold, self._draft, self._request.compressor
        if not fold or draft.tail < fold or not draft.has_codes:
            return
        assert compressor is not None
        try:
            folded = draft.fold(compressor.extend(draft.current(), draft.tail_view(), CompressContext()))
        except Exception as error:
            raise CompressorFault(f"compressor {compressor.name!r} failed in extend", cause=describe(error)) from error
        if not folded:
            raise CompressorFault(f"compressor {compressor.name!r} cannot extend without the full KV")

    def _run(self, tokens: Sequence[int]) -> Tensor:
        """Run ``tokens`` as provisional rows behind the draft KV; returns the logits ``[vocab]`` of the last."""
        adapter = self.engine.adapter
        for first in range(0, len(tokens), adapter.most_rows):
            block = tuple(tokens[first : first + adapter.most_rows])
            segment = Segment(self._request, Want("draft", block, self._draft.tokens), 0, len(block))
            tile = TileAttention(adapter.layers, [segment], self._attend, lambda *_: None)
            positions = range(self._draft.tokens, self._draft.tokens + len(block))
            try:
                logits = adapter.step(block, positions, tile)[len(block) - 1]
            except StepFault as fault:
                raise fault.error from fault
            self._draft.advance(len(block))
            self._provisional.extend(block)
        return logits
