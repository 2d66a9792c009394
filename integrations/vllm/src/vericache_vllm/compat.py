"""Signatures of everything in vLLM and LMCache that this package hooks into, checked before use.

Both change their internals between releases without notice. A hook that is gone or takes other arguments is refused by
name at start, since what it would do otherwise is unknown.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import re
from dataclasses import dataclass
from typing import Any

from vericache_core.errors import UsageError

SUPPORTED = {"vllm": ((0, 32), (0, 33)), "lmcache": ((0, 5), (0, 5))}
"""First and last release, ``(major, minor)``, that the hooks below are known of."""


class IncompatibleEngineError(UsageError):
    """This vLLM or LMCache is not one that the hooks are known of; the message names the first that differs."""


@dataclass(frozen=True, slots=True)
class Hook:
    """A callable or class that is used, and how.

    Attributes:
        path: ``module:attribute``, dots between nested attributes.
        parameters: exact names of a callable's parameters, in order.
        fields: names that a class, or its constructor, must have; further ones are fine.
    """

    path: str
    parameters: tuple[str, ...] | None = None
    fields: tuple[str, ...] = ()


_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"
_MP = "lmcache.integration.vllm.lmcache_mp_connector:LMCacheMPConnector"
_ADAPTER = "lmcache.integration.vllm.vllm_multi_process_adapter:LMCacheMPSchedulerAdapter"
_CONSTRUCTOR = ("self", "vllm_config", "role", "kv_cache_config")
_LOOKUP = ("self", "request", "num_computed_tokens")
_FINISHED = ("self", "request", "block_ids")

HOOKS: dict[str, tuple[Hook, ...]] = {
    "verifier": (
        Hook(
            "vllm:SamplingParams",
            fields=(
                "temperature",
                "max_tokens",
                "ignore_eos",
                "detokenize",
                "prompt_logprobs",
                "skip_reading_prefix_cache",
                "extra_args",
            ),
        ),
        Hook("vllm:RequestOutput", fields=("prompt_token_ids", "prompt_logprobs", "outputs", "num_cached_tokens")),
        Hook("vllm.logprobs:Logprob", fields=("logprob", "rank")),
        Hook(
            "vllm.config:KVTransferConfig",
            fields=(
                "kv_connector",
                "kv_connector_module_path",
                "kv_role",
                "kv_connector_extra_config",
                "kv_load_failure_policy",
            ),
        ),
    ),
    "connector": (
        Hook(f"{_BASE}.__init__", _CONSTRUCTOR),
        Hook(f"{_BASE}.get_num_new_matched_tokens", _LOOKUP),
        Hook(f"{_BASE}.on_new_request", ("self", "request")),
        Hook(f"{_BASE}.request_finished", _FINISHED),
        Hook("vllm.v1.request:Request.__init__", fields=("request_id", "sampling_params")),
        Hook(f"{_MP}.__init__", _CONSTRUCTOR),
        Hook(f"{_MP}.get_num_new_matched_tokens", _LOOKUP),
        Hook(f"{_MP}.on_new_request", ("self", "request")),
        Hook(f"{_MP}.request_finished", _FINISHED),
        Hook(f"{_MP}.request_finished_all_groups", _FINISHED),
        Hook(
            f"{_ADAPTER}.maybe_submit_lookup_request",
            ("self", "request_id", "token_ids", "cache_salt", "request_configs", "reserve_last_token"),
        ),
    ),
    "endpoint": (
        Hook("vllm.plugins.endpoint_plugins.interface:EndpointPlugin", fields=("name", "required_tasks")),
        Hook("vllm.plugins.endpoint_plugins.interface:EndpointPlugin.attach_router", ("self", "app")),
        Hook("vllm.plugins.endpoint_plugins.interface:EndpointPlugin.init_state", ("self", "engine_client", "state", "args")),
        Hook(
            "vllm.engine.protocol:EngineClient.generate",
            fields=("prompt", "sampling_params", "request_id"),
        ),
    ),
    "speculation": (
        Hook(
            "vllm.config:SpeculativeConfig",
            fields=("method", "model", "num_speculative_tokens", "rejection_sample_method", "kv_cache_dtype"),
        ),
        Hook("vllm.v1.sample.rejection_sampler:RejectionSampler.__init__", fields=("sampler", "spec_config", "device")),
        Hook("vllm.config:VllmConfig", fields=("additional_config",)),
    ),
    "waiting": (
        Hook("vllm.distributed.device_communicators.shm_broadcast:SpinCondition.record_read", ("self",)),
        Hook(
            "vllm.distributed.device_communicators.shm_broadcast:SpinCondition.__init__",
            ("self", "is_reader", "context", "notify_address", "busy_loop_s"),
        ),
    ),
    "attention": (
        Hook("vllm.v1.attention.backends.registry:register_backend", ("backend", "class_path", "is_mamba")),
        Hook("vllm.v1.attention.backends.cpu_attn:CPUAttentionBackend.get_impl_cls", ()),
        Hook(
            "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.do_kv_cache_update",
            ("self", "layer", "key", "value", "kv_cache", "slot_mapping"),
        ),
        Hook("vllm.config.vllm:get_current_vllm_config_or_none", ()),
    ),
}


def require_compatible(part: str) -> None:
    """Refuse releases and hooks that are not known; cheap after the first call.

    Args:
        part: which hooks are about to be used, a key of :data:`HOOKS`.

    Raises:
        IncompatibleEngineError: naming the release or the first hook that differs.
    """
    _checked(part, HOOKS[part])


@functools.cache
def _checked(part: str, hooks: tuple[Hook, ...]) -> None:
    for name in ("vllm", "lmcache") if part == "connector" else ("vllm",):
        _check_release(name)
    for hook in hooks:
        problem = difference(hook)
        if problem is not None:
            raise IncompatibleEngineError(
                f"{hook.path} is not what the {part} was written for", cause=problem, hint=f"use {_range('vllm')}"
            )


def difference(hook: Hook) -> str | None:
    """What is wrong with ``hook`` here, or ``None``."""
    module, _, attributes = hook.path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in attributes.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        return str(error)
    if hook.parameters is not None:
        names = tuple(inspect.signature(found).parameters)
        if names != hook.parameters:
            return f"it takes ({', '.join(names)}), expected ({', '.join(hook.parameters)})"
    known = {*dir(found), *getattr(found, "__annotations__", ()), *(inspect.signature(found).parameters if hook.fields else ())}
    missing = [name for name in hook.fields if name not in known]
    return f"it has no {', '.join(missing)}" if missing else None


def release_of(name: str) -> str:
    """Version of vLLM or LMCache as it says itself; builds of vLLM for the CPU have another distribution name.

    Raises:
        IncompatibleEngineError: it is not installed.
    """
    try:
        return str(importlib.import_module("vllm").__version__) if name == "vllm" else importlib.metadata.version(name)
    except (ImportError, importlib.metadata.PackageNotFoundError) as error:
        raise IncompatibleEngineError(f"{name} is not installed", cause=str(error), hint="see docs/vllm.md") from error


def _check_release(name: str) -> None:
    release = release_of(name)
    match = re.match(r"(\d+)\.(\d+)", release)
    first, last = SUPPORTED[name]
    if match is None or not first <= (int(match[1]), int(match[2])) <= last:
        raise IncompatibleEngineError(f"{name} {release} is not supported", hint=f"use {_range(name)}")


def _range(name: str) -> str:
    first, last = (".".join(map(str, release)) for release in SUPPORTED[name])
    return f"{name} {first}" if first == last else f"{name} {first} to {last}"
