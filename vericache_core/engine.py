"""The public engine: load a model, generate with a compressed cache, get the output of the full one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from vericache_core.attach import Compressors
from vericache_core.building import CONFIGURED, RequestBuilder
from vericache_core.cache.link import Link
from vericache_core.cache.ring import SwapRing
from vericache_core.cache.tiers import DiskStore
from vericache_core.config import EngineConfig, replace
from vericache_core.errors import ConfigError, VeriCacheError
from vericache_core.model.adapter import ModelAdapter
from vericache_core.model.admission import admit, other_shapes
from vericache_core.model.graphs import capture_steps
from vericache_core.model.load import load_model
from vericache_core.model.prompts import Prompt, is_single_prompt, text_encoder
from vericache_core.outputs import Job, RequestOutput, StreamChunk, output_of, progress_of
from vericache_core.plugins.registry import Registry, default_registry
from vericache_core.runtime.assistant import load_assistant
from vericache_core.runtime.backend import choose_attention, set_threads
from vericache_core.runtime.loop import StepLoop
from vericache_core.runtime.measure import fingerprint, measure
from vericache_core.runtime.planning import Planner
from vericache_core.runtime.request import Request
from vericache_core.runtime.reuse import open_reuse
from vericache_core.runtime.sampling_params import SamplingParams
from vericache_core.service.audit import IdentityAudit
from vericache_core.stores.start import check_store

if TYPE_CHECKING:
    from typing_extensions import Self

Progress = Callable[[int, int, int, int], None]


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
        self.compressors = Compressors(registry or default_registry(), self.config, self.adapter.layers)
        self.attention, attend = choose_attention(self.config.attention, self.adapter.device)
        self.attend = attend
        helper = None
        if self.config.proposer == "assistant":
            helper = load_assistant(self.config, assistant, self.adapter, tokenizer, attend)
        rows = self.config.rows
        further = () if self.config.shapes == "one" else other_shapes(rows)
        self.admission = admit(self.adapter, attend, self.config.identity, self.config.probe, further)
        capture_steps(self.adapter, self.config.graphs)
        self.reuse = open_reuse(self.config, self.adapter, tokenizer, self.attention)
        self.audit = None if self.config.audit_every is None else IdentityAudit(self, None, self.config.audit_every)
        self._ring = SwapRing(self.config.ring_layers, self.adapter.device, Link(self.config.link_bytes_per_s))
        self._lock = threading.RLock()
        # What runs here although the full KV is elsewhere (a plain request, recovery) has its own on the device.
        local = replace(self.config, full_kv="device", remote=None) if self.config.full_kv == "remote" else self.config
        self.planner = Planner(
            local,
            self.adapter,
            lambda: measure(self.adapter, attend, self.config.swap_dir),
            lambda: fingerprint(self.adapter),
        )
        encode = text_encoder(tokenizer)
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
            lambda request: self.builder.make_full_kv(request.compressor, self.builder.tier(request.metrics.mode)),
            self.planner.holds,
            self.config.fold,
            self.config.on_compressor_error,
            self.config.on_swap_error,
            encode,
            self.planner.link_meter,
            self.reuse,
        )
        self.builder: RequestBuilder = RequestBuilder(
            self.config,
            self.adapter,
            tokenizer,
            encode,
            self._ring,
            self.planner,
            self.loop.company,
            self.compressors,
            helper,
            self.admission.identity,
        )
        if self.config.compressor is not None:
            if self.planner.chooses:
                _ = self.planner.pricer  # measured now, while nothing else runs
            # An unknown name or a bad option must not wait for the first prompt.
            self.compressors.configured(self.config.compressor)

    @classmethod
    def from_pretrained(cls, model: str = "demo", config: EngineConfig | None = None, **overrides: Any) -> Engine:
        """Load ``model`` (``demo``, a folder, a hub id, a GGUF file) and build an engine.

        ``overrides`` change single fields of ``config``.
        """
        config = replace(config or EngineConfig(), **overrides)
        if config.prefix_store is not None:
            check_store(config.prefix_store)  # what cannot be used must not wait for the model
        if config.full_kv == "disk" and config.mode != "plain":
            DiskStore([], config.swap_dir).close()
        device = config.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigError(f"device={device}: torch finds no CUDA device here", hint="device=cpu, or a CUDA build of torch")
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
        compressor: str | Sequence[str | None] | None = CONFIGURED,
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
                    requests.append(self.builder.for_prompt(prompt, own, name, record_logits=record_logits, company=len(many)))
                coming = deque(requests)
                while any(not request.finished for request in requests):
                    while coming and self.loop.queued < self.config.max_queue:
                        self.loop.add(coming.popleft())
                    self.loop.step()
                    if progress is not None:
                        progress(*progress_of(requests))
            finally:
                for request in requests:
                    self._drop(request)
            return [self._audited(request) for request in requests]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, compressor: str | None = CONFIGURED
    ) -> Generator[StreamChunk, None, None]:
        """Generate for one prompt, yielding text as soon as it is certain. Closing the iterator cancels.

        Raises:
            VeriCacheError: the request failed; everything yielded before is right.
        """
        with self._lock:
            request = self.builder.for_prompt(prompt, params or SamplingParams(), compressor)
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
        compressor: str | None = CONFIGURED,
        priority: int = 0,
        record_logits: bool = False,
        tenant: str = "",
    ) -> Job:
        """Take a request in while others run; :meth:`step` runs them all.

        A higher ``priority`` goes first, and may preempt lower ones. Requests of one ``tenant`` find nothing in the prefix
        store that those of another left there. The rest is as for :meth:`generate`.

        Raises:
            PromptError, ConfigError: the request cannot be run, or can never fit into the budgets.
            QueueFull: ``max_queue`` requests wait already.
        """
        with self._lock:
            company = len(self.loop.live) + 1
            own = params or SamplingParams()
            request = self.builder.for_prompt(
                prompt, own, compressor, record_logits=record_logits, company=company, priority=priority
            )
            request.tenant = tenant
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
