"""How an engine builds requests: caches, token choice, pace and proposers, as its configuration and its planner say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

from vericache_core.attach import Compressors
from vericache_core.cache.full import FullKV
from vericache_core.cache.ring import SwapRing
from vericache_core.compressor import Compressor
from vericache_core.config import EngineConfig
from vericache_core.errors import PromptError
from vericache_core.model.adapter import ModelAdapter
from vericache_core.model.prompts import Prompt, encode_prompt, ending_ids
from vericache_core.runtime.assistant import Assistant, AssistantProposer
from vericache_core.runtime.choose import TokenChooser
from vericache_core.runtime.compress import uncompressed_layers
from vericache_core.runtime.detokenize import TextDecoder
from vericache_core.runtime.modes import Mode
from vericache_core.runtime.output import OutputBuffer
from vericache_core.runtime.planning import Planner
from vericache_core.runtime.propose import NGramProposer
from vericache_core.runtime.request import Request
from vericache_core.runtime.sampling_params import SamplingParams

RequestMode = Mode | Literal["remote"]
CONFIGURED: Final = "configured"
"""Stands for the compressor that the configuration names."""


class RequestBuilder:
    """Builds the requests of one engine.

    Args:
        config, adapter, tokenizer, ring, planner: of the engine.
        encode: text -> token ids, for parameters that hold text; None without a tokenizer.
        company: requests that decode side by side, and those of them whose full KV is swapped.
        compressors: makes theirs.
        assistant: proposes, when given.
        identity: the promise that requests run under.
    """

    def __init__(
        self,
        config: EngineConfig,
        adapter: ModelAdapter,
        tokenizer: Any,
        encode: Callable[[str], list[int]] | None,
        ring: SwapRing,
        planner: Planner,
        company: Callable[[], tuple[int, int]],
        compressors: Compressors,
        assistant: Assistant | None,
        identity: str,
    ) -> None:
        self._config, self._adapter, self._tokenizer, self._encode = config, adapter, tokenizer, encode
        self._ring, self._planner, self._company = ring, planner, company
        self._compressors, self.assistant, self._identity = compressors, assistant, identity
        self._eos = ending_ids(adapter.model, tokenizer)
        self._decoder = None if tokenizer is None else TextDecoder(tokenizer)

    def for_prompt(
        self,
        prompt: Prompt,
        params: SamplingParams,
        compressor: str | None = CONFIGURED,
        *,
        record_logits: bool = False,
        company: int = 1,
        priority: int = 0,
    ) -> Request:
        """Build a request, one of ``company``, with all that is decided about it before it runs.

        Raises:
            PromptError, ConfigError: it cannot be run.
        """
        ids, protected = encode_prompt(prompt, self._tokenizer, self._adapter.vocab_size)
        self.check_length(len(ids), params)
        name = self._config.compressor if compressor == CONFIGURED else compressor
        drafts = name is not None or (compressor == CONFIGURED and self._config.remote_mode in {"remote", "fetch"})
        remote = drafts and self._config.full_kv == "remote"
        drafter = None if name is None or params.max_new_tokens < 2 else self._compressors.configured(name)
        mode: RequestMode = "remote"
        if not remote:
            mode = self._planner.mode(
                None if drafter is None else name, len(ids) + params.max_new_tokens, params.max_new_tokens, company
            )
        if mode in ("plain", "remote"):  # where the full KV is elsewhere, so is what compresses it
            drafter = None
        request = self.make_request(ids, params, self.make_full_kv(drafter, self.tier(mode)), drafter, priority)
        if self._config.proposer == "ngram":
            request.proposals.proposer = NGramProposer()
        if self.assistant is not None:
            request.proposals.proposer = AssistantProposer(self.assistant, request.chooser.draft, len(ids))
        request.proposals.speculation = self._planner.speculation(request, self._company)
        if drafter is not None and name is not None:
            request.pace = self._planner.pace(request, name, self._company)
        request.metrics.mode = mode
        request.metrics.compressor, request.metrics.identity = name, self._identity
        request.protected = protected
        request.logits = [] if record_logits else None
        return request

    def make_request(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        full: FullKV,
        compressor: Compressor | None = None,
        priority: int = 0,
    ) -> Request:
        """Build a request for whoever drives the step loop themselves; ``full`` is its empty full KV.

        Raises:
            ConfigError: the parameters do not fit the model or its tokenizer.
        """
        chooser = TokenChooser(params, ids, self._eos, self._adapter.vocab_size, self._encode)
        output = OutputBuffer(params, self._eos, self._decoder)
        window = 0 if self._config.window == "auto" else self._config.window
        return Request(ids, params, chooser, output, full, compressor, window, priority)

    def tier(self, mode: str) -> str:
        """Where the full KV of a request of ``mode`` lives."""
        # Plain decoding needs every row at every step: on another tier it would stream the whole cache per token.
        return self._config.full_kv if mode == "offloaded" else "device"

    def make_full_kv(self, compressor: Compressor | None, tier: str, kind: type[FullKV] = FullKV) -> FullKV:
        """An empty full KV on ``tier``, of the class ``kind``; layers that ``compressor`` declines stay on the device.

        Raises:
            SwapError: the tier cannot be set up.
        """
        pinned = uncompressed_layers(self._adapter, compressor)
        return kind(self._adapter.layers, self._adapter.device, tier, pinned, self._ring, self._config.swap_dir)

    def check_length(self, prompt: int, params: SamplingParams) -> None:
        """Raise ``PromptError`` if a prompt of so many tokens and what it may generate do not fit the model."""
        limits = [limit for limit in (self._adapter.max_positions, self._config.max_model_len) if limit is not None]
        if not limits:
            return
        limit: int = min(limits)
        if prompt > limit:
            raise PromptError(f"the prompt has {prompt} tokens, the model takes {limit}", hint="shorten it")
        if prompt + params.max_new_tokens > limit:
            raise PromptError(
                f"{prompt} prompt tokens and max_new_tokens={params.max_new_tokens} exceed the model's {limit} positions",
                hint=f"max_new_tokens={limit - prompt} fits",
            )
