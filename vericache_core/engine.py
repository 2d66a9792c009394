"""The public engine: load a model, generate with a compressed cache, get the output of the full one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from vericache_core.cache.full import FullKV
from vericache_core.cache.link import Link
from vericache_core.cache.ring import SwapRing
from vericache_core.compressor import Compressor
from vericache_core.config import EngineConfig, replace
from vericache_core.errors import (
    CompressorFault,
    ConfigError,
    ConformanceRequiredError,
    PromptError,
    VeriCacheError,
)
from vericache_core.model.adapter import ModelAdapter
from vericache_core.model.admission import admit, other_shapes
from vericache_core.model.graphs import capture_steps
from vericache_core.model.load import load_model
from vericache_core.model.prompts import encode_prompt, ending_ids
from vericache_core.outputs import Job, RequestOutput, StreamChunk, output_of
from vericache_core.plugins.registry import Registry, default_registry
from vericache_core.runtime.assistant import Assistant, AssistantProposer, check_vocabulary
from vericache_core.runtime.backend import choose_attention, set_threads
from vericache_core.runtime.background import is_safe
from vericache_core.runtime.choose import TokenChooser
from vericache_core.runtime.compress import uncompressed_layers
from vericache_core.runtime.detokenize import TextDecoder
from vericache_core.runtime.loop import StepLoop
from vericache_core.runtime.measure import fingerprint, measure
from vericache_core.runtime.modes import Mode
from vericache_core.runtime.output import OutputBuffer
from vericache_core.runtime.planning import Planner
from vericache_core.runtime.propose import NGramProposer
from vericache_core.runtime.request import Request, describe
from vericache_core.runtime.reuse import open_reuse
from vericache_core.runtime.sampling_params import SamplingParams
from vericache_core.service.audit import IdentityAudit
from vericache_core.stores.url import check_store

if TYPE_CHECKING:
    from typing_extensions import Self

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
Progress = Callable[[int, int, int, int], None]
RequestMode = Mode | Literal["remote"]
_CONFIGURED = "configured"


class Engine:
    """Generates over one model. Use one thread at a time; a second one waits.

    Build with :meth:`from_pretrained`, or give a loaded ``transformers`` model. ``assistant`` is a model with its
    tokenizer for ``proposer="assistant"``; the one that the configuration names is loaded otherwise.

    Raises:
        UnsupportedModelError: the model cannot be run exactly; the message names why.
        IdentityError: ``identity="bitwise"`` cannot be promised on this machine.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        config: EngineConfig | None = None,
        registry: Registry | None = None,
        assistant: tuple[Any, Any] | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        if self.config.threads:
            set_threads(self.config.threads)
        self.tokenizer = tokenizer
        self.adapter = ModelAdapter(model, self.config.rows, self.config.pack_weights, self.config.fuse)
        self._registry = (registry or default_registry()).without(self.config.disable_plugins)
        self.attention, attend = choose_attention(self.config.attention, self.adapter.device)
        self.attend = attend
        self._assistant = self._make_assistant(assistant) if self.config.proposer == "assistant" else None
        rows = self.config.rows
        further = () if self.config.shapes == "one" else other_shapes(rows)
        self.admission = admit(self.adapter, attend, self.config.identity, self.config.probe, further)
        capture_steps(self.adapter, self.config.graphs)
        self.reuse = open_reuse(self.config, self.adapter, tokenizer, self.attention)
        self.audit = None if self.config.audit_every is None else IdentityAudit(self, None, self.config.audit_every)
        self._ring = SwapRing(self.config.ring_layers, self.adapter.device, Link(self.config.link_bytes_per_s))
        self._eos = ending_ids(model, tokenizer)
        self._decode = None if tokenizer is None else TextDecoder(tokenizer)
        self._lock = threading.RLock()
        # What runs here although the full KV is elsewhere (a plain request, recovery) has its own on the device.
        local = replace(self.config, full_kv="device", remote=None) if self.config.full_kv == "remote" else self.config
        self.planner = Planner(
            local,
            self.adapter,
            lambda: measure(self.adapter, attend, self.config.swap_dir),
            lambda: fingerprint(self.adapter),
        )
        make_loop: Callable[..., StepLoop] = StepLoop
        if self.config.full_kv == "remote":
            from vericache_core.remote import require_grpc

            require_grpc()
            from vericache_core.remote.loop import RemoteLoop

            make_loop = RemoteLoop.connected(self)
        self.loop = make_loop(
            self.adapter,
            attend,
            self._ring,
            self.planner.scheduler,
            lambda request: self._full_kv(request.compressor, request.metrics.mode),
            self.planner.holds,
            self.config.fold,
            self.config.on_compressor_error,
            self.config.on_swap_error,
            None if tokenizer is None else self._encode,
            lambda: is_safe(self.attention),
            self.planner.link_meter,
            self.reuse,
        )
        if self.config.compressor is not None:
            if self.planner.chooses:
                _ = self.planner.pricer  # measured now, while nothing else runs
            self._compressor(self.config.compressor)  # an unknown name or a bad option must not wait for the first prompt

    @classmethod
    def from_pretrained(cls, model: str = "demo", config: EngineConfig | None = None, **overrides: Any) -> Engine:
        """Load ``model`` (``demo``, a folder, a hub id, a GGUF file) and build an engine.

        ``overrides`` change single fields of ``config``.
        """
        config = replace(config or EngineConfig(), **overrides)
        if config.prefix_store is not None:
            check_store(config.prefix_store)  # what cannot be used must not wait for the model
        device = config.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
        if dtype is None and model == "demo":
            dtype = torch.bfloat16
        loaded, tokenizer = load_model(model, dtype, device)
        return cls(loaded, tokenizer, config)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        compressor: str | Sequence[str | None] | None = _CONFIGURED,
        record_logits: bool = False,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Generate for each prompt; outputs come in the order of the prompts.

        Args:
            prompts: a string, a chat (list of ``{"role", "content"}``), a list of token ids, or a list of these.
            params: one for all, or one each; default greedy, 128 tokens.
            compressor: overrides the configured one, for all prompts or one each; ``None`` is plain full-KV
                decoding, the reference that identity is measured against.
            record_logits: keep the logits row behind every committed token.
            progress: called after each step with (prompt rows done, prompt rows, new tokens, most new tokens).

        Raises:
            PromptError, ConfigError: before anything runs. A failure of one request while running ends that
                one with ``finish_reason="error"``; the others go on.
        """
        many: list[Any] = [prompts] if is_single_prompt(prompts) else list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(many)
        if len(each) != len(many):
            raise ConfigError(f"{len(many)} prompts but {len(each)} sampling parameters")
        names = [compressor] * len(many) if compressor is None or isinstance(compressor, str) else list(compressor)
        if len(names) != len(many):
            raise ConfigError(f"{len(many)} prompts but {len(names)} compressors")
        with self._lock:
            requests: list[Request] = []
            try:
                for prompt, own, name in zip(many, each, names, strict=True):
                    requests.append(self._request(prompt, own, name, record_logits, company=len(many)))
                coming = deque(requests)
                while any(not request.finished for request in requests):
                    while coming and self.loop.queued < self.config.max_queue:
                        self.loop.add(coming.popleft())
                    self.loop.step()
                    if progress is not None:
                        progress(*_progress(requests))
            finally:
                for request in requests:
                    self._drop(request)
            return [self._audited(request) for request in requests]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, compressor: str | None = _CONFIGURED
    ) -> Generator[StreamChunk, None, None]:
        """Generate for one prompt, yielding text as soon as it is certain. Closing the iterator cancels.

        Raises:
            VeriCacheError: the request failed; everything yielded before is right.
        """
        request = self._request(prompt, params or SamplingParams(), compressor, False)
        with self._lock:
            self.loop.add(request)
        seen = 0
        try:
            done = False
            while not done:
                with self._lock:
                    if not request.finished:
                        self.loop.step()
                done = request.finished
                if done and request.error is not None:
                    raise request.error
                fresh = tuple(request.generated[seen:])
                seen += len(fresh)
                text = request.output.take_delta()
                if fresh or text or done:
                    yield StreamChunk(text, fresh, self._audited(request) if done else None)
        finally:
            with self._lock:
                self._drop(request)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        compressor: str | None = _CONFIGURED,
        priority: int = 0,
        record_logits: bool = False,
    ) -> Job:
        """Take a request in while others run; :meth:`step` runs them all.

        A higher ``priority`` goes first, and may preempt lower ones; the rest is as for :meth:`generate`.

        Raises:
            PromptError, ConfigError: the request cannot be run, or can never fit into the budgets.
            QueueFull: ``max_queue`` requests wait already.
        """
        with self._lock:
            company = len(self.loop.live) + 1
            request = self._request(prompt, params or SamplingParams(), compressor, record_logits, company, priority)
            try:
                self.loop.add(request)
            except VeriCacheError:
                request.close()
                raise

        def drop() -> None:
            request.full.abort()  # before the lock: a step that waits for its swap holds it
            with self._lock:
                self._drop(request)

        return Job(request, self.step, drop, lambda: self._audited(request))

    def step(self) -> bool:
        """Run one step of everything that was submitted; False when there is nothing left to run."""
        with self._lock:
            if self.loop.live:
                self.loop.step()
            return bool(self.loop.live)

    def close(self) -> None:
        """Cancel what runs and give back memory, files and threads; prefixes that wait to be saved are, within seconds."""
        for request in self.loop.live:  # before the lock: a step that waits for a swap holds it
            request.full.abort()
        with self._lock:
            for request in self.loop.live:
                self._drop(request)
            self.loop.close()
            self._ring.close()
            if self.reuse is not None:
                self.reuse.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- building requests ---------------------------------------------------------------------------

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
        name = self.config.compressor if compressor == _CONFIGURED else compressor
        drafts = name is not None or (compressor == _CONFIGURED and self.config.remote_mode in {"remote", "fetch"})
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
        request.direct = self.planner.direct(request, self.loop.company)
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

    # -- results -------------------------------------------------------------------------------------

    def _drop(self, request: Request) -> None:
        if not request.finished:
            request.output.close("cancelled")
        self.loop.remove(request)

    def _audited(self, request: Request) -> RequestOutput:
        output = output_of(request, self.adapter.vocab_size, self.adapter.dtype)
        if self.audit is not None and output.metrics.identical is None:
            output.metrics.identical = self.audit.consider(output, request.params)
        return output


def _progress(requests: Sequence[Request]) -> tuple[int, int, int, int]:
    return (
        sum(min(request.full.tokens, request.prompt_tokens) for request in requests),
        sum(request.prompt_tokens for request in requests),
        sum(len(request.generated) for request in requests),
        sum(request.params.max_new_tokens for request in requests),
    )


def is_single_prompt(prompts: Any) -> bool:
    """Whether ``prompts`` is one prompt (text, token ids, chat) rather than a list of prompts."""
    if isinstance(prompts, str):
        return True
    first = next(iter(prompts), None)
    return isinstance(first, int | Mapping)
