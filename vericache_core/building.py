"""How an engine builds requests: compressors, caches, pace and proposers, as its configuration and its planner say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

from vericache_core.cache.full import FullKV
from vericache_core.cache.ring import SwapRing
from vericache_core.compressor import Compressor
from vericache_core.config import EngineConfig
from vericache_core.errors import CompressorFault, ConfigError, ConformanceRequiredError, PromptError, VeriCacheError
from vericache_core.model.adapter import ModelAdapter
from vericache_core.model.admission import Admission
from vericache_core.model.load import load_model
from vericache_core.model.prompts import encode_prompt
from vericache_core.plugins.registry import Registry
from vericache_core.runtime.assistant import Assistant, AssistantProposer, check_vocabulary
from vericache_core.runtime.choose import TokenChooser
from vericache_core.runtime.compress import uncompressed_layers
from vericache_core.runtime.detokenize import TextDecoder
from vericache_core.runtime.loop import StepLoop
from vericache_core.runtime.modes import Mode
from vericache_core.runtime.output import OutputBuffer
from vericache_core.runtime.planning import Planner
from vericache_core.runtime.propose import NGramProposer
from vericache_core.runtime.request import Request, describe
from vericache_core.runtime.sampling_params import SamplingParams
from vericache_core.runtime.tile import AttendFunction

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
RequestMode = Mode | Literal["remote"]
CONFIGURED: Final = "configured"
"""Stands for the compressor that the configuration names."""


class RequestBuilding:
    """The part of an engine that builds requests; the engine sets the attributes."""

    config: EngineConfig
    tokenizer: Any
    adapter: ModelAdapter
    admission: Admission
    attend: AttendFunction
    planner: Planner
    loop: StepLoop
    _registry: Registry
    _ring: SwapRing
    _assistant: Assistant | None
    _eos: tuple[int, ...]
    _decode: TextDecoder | None

    def _request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        compressor: str | None,
        record: bool,
        company: int = 1,
        priority: int = 0,
    ) -> Request:
        ids, protected = encode_prompt(prompt, self.tokenizer, self.adapter.vocab_size)
        self.check_length(len(ids), params)
        name = self.config.compressor if compressor == CONFIGURED else compressor
        drafts = name is not None or (compressor == CONFIGURED and self.config.remote_mode in {"remote", "fetch"})
        remote = drafts and self.config.full_kv == "remote"
        drafter = None if name is None or params.max_new_tokens < 2 else self._compressor(name)
        mode: RequestMode = "remote"
        if not remote:
            mode = self.planner.mode(
                None if drafter is None else name, len(ids) + params.max_new_tokens, params.max_new_tokens, company
            )
        if mode in ("plain", "remote"):  # where the full KV is elsewhere, so is what compresses it
            drafter = None
        request = self.make_request(ids, params, self._full_kv(drafter, mode), drafter, priority)
        if self.config.proposer == "ngram":
            request.proposer = NGramProposer()
        if self._assistant is not None:
            request.proposer = AssistantProposer(self._assistant, request.chooser.draft, len(ids))
        request.speculation = self.planner.speculation(request, self.loop.company)
        if drafter is not None and name is not None:
            request.pace = self.planner.pace(request, name, self.loop.company)
        request.metrics.mode = mode
        request.metrics.compressor, request.metrics.identity = name, self.admission.identity
        request.protected = protected
        request.logits = [] if record else None
        return request

    def make_request(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        full: FullKV,
        compressor: Compressor | None = None,
        priority: int = 0,
    ) -> Request:
        """Build a request for whoever drives :attr:`loop` themselves; ``full`` is its empty full KV.

        Raises:
            ConfigError: the parameters do not fit the model or its tokenizer.
        """
        encode = None if self.tokenizer is None else self._encode
        chooser = TokenChooser(params, ids, self._eos, self.adapter.vocab_size, encode)
        output = OutputBuffer(params, self._eos, self._decode)
        window = 0 if self.config.window == "auto" else self.config.window
        return Request(ids, params, chooser, output, full, compressor, window, priority)

    def _compressor(self, name: str) -> Compressor:
        return self.make_compressor(name, self.config.compressor_options() if name == self.config.compressor else {})

    def make_compressor(self, name: str, options: Mapping[str, Any]) -> Compressor:
        """A compressor of its own for each request, so that no state can leak between them.

        Raises:
            UnknownCompressorError, OptionError, ConformanceRequiredError, CompressorFault: it cannot be had.
        """
        if self.config.require_conformant:
            self._require_conformant(name)
        compressor = self._registry.create(name, options)
        check = getattr(compressor, "check_layers", None)
        try:
            if callable(check):  # part of the bases, not of the protocol
                check(self.adapter.layers)
            _ = compressor.needs, [compressor.supports(layer) for layer in self.adapter.layers]
        except VeriCacheError:
            raise
        except Exception as error:
            raise CompressorFault(f"compressor {name!r} failed when it was attached", cause=describe(error)) from error
        return compressor

    def _require_conformant(self, name: str) -> None:
        standing = self._registry.conformance(name)
        if standing.standing != "conformant":
            raise ConformanceRequiredError(
                f"compressor {name!r} is {standing.standing}, and require_conformant is set",
                cause=standing.detail,
                hint=f"vericache-conform run {name} --passport",
            )

    def _make_assistant(self, given: tuple[Any, Any] | None) -> Assistant:
        config = self.config
        if given is None and config.assistant is None:
            raise ConfigError('proposer="assistant" needs a model', hint="name one: assistant=NAME")
        model, tokenizer = given or load_model(str(config.assistant), self.adapter.dtype, str(self.adapter.device))
        made = Assistant(model, self.attend, config.rows, config.pack_weights, self.adapter.vocab_size)
        check_vocabulary(self.tokenizer, tokenizer, self.adapter.vocab_size, made.adapter.vocab_size)
        return made

    def _full_kv(self, compressor: Compressor | None, mode: str) -> FullKV:
        # Plain decoding needs every row at every step: on another tier it would stream the whole cache per token.
        return self.make_full_kv(compressor, self.config.full_kv if mode == "offloaded" else "device")

    def make_full_kv(self, compressor: Compressor | None, tier: str) -> FullKV:
        """An empty full KV on ``tier``; layers that ``compressor`` declines stay on the device.

        Raises:
            SwapError: the tier cannot be set up.
        """
        pinned = uncompressed_layers(self.adapter, compressor)
        return FullKV(self.adapter.layers, self.adapter.device, tier, pinned, self._ring, self.config.swap_dir)

    def check_length(self, prompt: int, params: SamplingParams) -> None:
        """Raise ``PromptError`` if a prompt of so many tokens and what it may generate do not fit the model."""
        limits = [limit for limit in (self.adapter.max_positions, self.config.max_model_len) if limit is not None]
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

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids
