"""Drafts inside of vLLM: its own speculative decoding, with a draft model whose KV is lossy, or n-gram, EAGLE and so on.

The full KV stays on the device here, so this saves bandwidth and no memory; a draft model is a second copy of the weights.
Everything below builds arguments for ``vllm.LLM`` and refuses those that would let vLLM commit a token that its full KV
does not agree with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vericache_core import default_registry
from vericache_core.errors import ConfigError, OptionError
from vericache_vllm.compat import require_compatible

EXACT_METHODS = frozenset({"standard", "block"})
"""Values of ``rejection_sample_method`` that keep greedy output; any other, known or not, is refused."""
EXACT_KV_DTYPES = frozenset({"auto", "float32", "float16", "bfloat16", "half", "float"})
COMPRESSOR = "vericache_draft"
"""Key of ``additional_config`` that names the compressor in the draft's attention layers."""


def speculative(**config: Any) -> dict[str, Any]:
    """``LLM(**speculative(method="ngram", num_speculative_tokens=4, ...))``: vLLM's own drafters, checked.

    Args:
        config: fields of vLLM's ``speculative_config``.

    Raises:
        ConfigError: a rejection method that is lossy or unknown.
        IncompatibleEngineError: this vLLM is not known.
    """
    require_compatible("speculation")
    refuse_lossy(config)
    return {"speculative_config": config}


def refuse_lossy(config: Mapping[str, Any], cache_dtype: str = "auto") -> None:
    """Refuse, by name, what would change tokens.

    Args:
        config: vLLM's ``speculative_config``.
        cache_dtype: the target's ``kv_cache_dtype``; the draft's own may be anything.

    Raises:
        ConfigError: naming the setting.
    """
    method = config.get("rejection_sample_method", "standard")
    if method not in EXACT_METHODS:
        raise ConfigError(
            f"rejection_sample_method={method!r} commits tokens that the full KV does not agree with",
            hint=f"use {' or '.join(sorted(EXACT_METHODS, reverse=True))}",
        )
    for name in ("synthetic_acceptance_rates", "synthetic_acceptance_rate", "synthetic_acceptance_length"):
        if config.get(name) is not None:
            raise ConfigError(f"{name} commits tokens that the full KV does not agree with", hint="leave it out")
    if cache_dtype not in EXACT_KV_DTYPES:
        raise ConfigError(
            f"kv_cache_dtype={cache_dtype!r} makes the full KV lossy", hint="set it in speculative_config, for the draft only"
        )


def dtype_draft(model: str, kv_cache_dtype: str, tokens: int, **further: Any) -> dict[str, Any]:
    """The model drafts for itself with its KV held in ``kv_cache_dtype``, such as ``"fp8"``.

    Args:
        model: folder or hub id of the target.
        kv_cache_dtype: of the draft's KV.
        tokens: drafted before a verification.
        further: fields of ``speculative_config``.
    """
    return speculative(
        method="draft_model", model=model, num_speculative_tokens=tokens, kv_cache_dtype=kv_cache_dtype, **further
    )


def compressed_draft(model: str, compressor: str, options: Mapping[str, Any], tokens: int, **further: Any) -> dict[str, Any]:
    """The model drafts for itself, each new KV row replaced by what a registered quantizer makes of it.

    Rows keep the width of the model's dtype: this shows what a compressor does to drafts on a real engine, and frees no
    memory. CPU only, since there the attention layers can be reached.

    Args:
        model: folder or hub id of the target.
        compressor: name of a quantizer that codes every token alone.
        options: of the compressor.
        tokens: drafted before a verification.
        further: fields of ``speculative_config``.

    Raises:
        OptionError: the compressor drops tokens, or codes several together.
    """
    require_compatible("attention")
    spec = default_registry().spec(compressor)
    if spec.kind != "quantization":
        raise OptionError(f"{compressor!r} is a {spec.kind} compressor", hint="vLLM's draft layers take quantizers only")
    default_registry().check_options(compressor, options)
    arguments = speculative(method="draft_model", model=model, num_speculative_tokens=tokens, **further)
    return {**arguments, "additional_config": {COMPRESSOR: {"name": compressor, "options": dict(options)}}}
