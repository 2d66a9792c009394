"""The identity of a loaded model: digests of its weights, its settings and the arithmetic of this machine."""

from __future__ import annotations

import functools
import hashlib
import json
import weakref
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import vericache_core
from vericache_core.kv import LayerDescriptor
from vericache_core.model.adapter import ModelAdapter
from vericache_core.model.refusals import rope_settings
from vericache_core.runtime.calibration import processor_name
from vericache_core.stores.identity import PrefixIdentity, canonical, digest

BLOCK = 16 << 20
"""Bytes of a tensor that are hashed at a time; also how much of a CUDA tensor is on the host at once."""
NAMED_APART = ("dtype", "torch_dtype", "rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
"""Settings that have a field of their own, so that a miss can name it."""
MEANINGLESS = ("transformers_version", "name_or_path", "architectures", "use_cache")
_digests: weakref.WeakKeyDictionary[Any, tuple[tuple[object, ...], str]] = weakref.WeakKeyDictionary()


def describe_model(adapter: ModelAdapter, tokenizer: Any, attention: str, tenant: str = "") -> PrefixIdentity:
    """The identity of rows that ``adapter`` computes with the implementation of attention called ``attention``."""
    return PrefixIdentity(
        weights=weights_digest(adapter.model),
        config=config_digest(adapter.model),
        layout=layout(adapter.layers),
        dtype=str(adapter.dtype).removeprefix("torch."),
        rotary=_json([dict(settings) for settings in rope_settings(adapter.config)] + _rotary(adapter.layers)),
        tokenizer=tokenizer_digest(tokenizer),
        adapter=active_adapters(adapter.model),
        numerics=_json(numerics(adapter, attention)),
        tenant=tenant,
    )


def weights_digest(model: Any) -> str:
    """SHA-256 over name, dtype, shape and bytes of every parameter and buffer of ``model``.

    It is computed once for a model: a second call only looks whether a tensor was replaced or written to.
    """
    tensors = sorted(_tensors(model))
    state = tuple((name, tensor.data_ptr(), _version(tensor)) for name, tensor in tensors)
    known = _digests.get(model)
    if known is not None and known[0] == state:
        return known[1]
    blocks = [block for _, tensor in tensors for block in _blocks(tensor)]
    with ThreadPoolExecutor(thread_name_prefix="vericache-digest") as pool:  # hashing lets go of the interpreter lock
        hashed = iter(list(pool.map(_hash, blocks)))
    parts: list[str | bytes] = []
    for name, tensor in tensors:
        parts += [name, str(tensor.dtype), str(tuple(tensor.shape)), *(next(hashed) for _ in _blocks(tensor))]
    found = digest("weights", *parts).hex()
    _digests[model] = (state, found)
    return found


def config_digest(model: Any) -> str:
    """Digest of the class and the configuration of ``model``, without what does not change a row."""
    settings = model.config.to_dict()
    return digest("config", type(model).__qualname__, _json(_meaningful(settings))).hex()


def layout(layers: Sequence[LayerDescriptor]) -> str:
    """Shapes and windows of the layers as JSON; numbers with a point in hexadecimal, so that no digit is lost."""
    return canonical(
        [
            [
                layer.kind,
                layer.heads,
                layer.kv_heads,
                layer.head_dim,
                layer.value_dim,
                layer.scaling.hex(),
                layer.sliding_window,
            ]
            for layer in layers
        ]
    )


def tokenizer_digest(tokenizer: Any) -> str:
    """Digest of a tokenizer: its whole description where it has one, else its vocabulary and special tokens."""
    if tokenizer is None:
        return ""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and hasattr(backend, "to_str"):
        return digest("tokenizer", str(backend.to_str())).hex()
    vocabulary = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    special = getattr(tokenizer, "special_tokens_map", {})
    return digest("tokenizer", type(tokenizer).__qualname__, _json(vocabulary), _json(special)).hex()


def active_adapters(model: Any) -> str:
    """Settings of the adapters that are active as JSON, empty without; their weights count among the model's."""
    if not getattr(model, "_hf_peft_config_loaded", False) and not hasattr(model, "peft_config"):
        return ""
    active = model.active_adapters
    names = active() if callable(active) else active
    settings = {name: config.to_dict() for name, config in getattr(model, "peft_config", {}).items()}
    return _json({"active": sorted(names), "settings": settings})


def numerics(adapter: ModelAdapter, attention: str) -> dict[str, Any]:
    """Everything about this machine and process that may change the bits of a sum."""
    device = adapter.device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    matmul: Any = torch.backends.cuda.matmul
    return {
        "attention": attention,
        "code": code_digest(),
        "rows": [adapter.rows, list(adapter.shapes)],
        "packed": adapter.packed_bytes > 0,
        "fused": adapter.fused_layers,
        "device": [device.type, where],
        "threads": torch.get_num_threads(),
        "torch": [torch.__version__, hashlib.sha256(torch.__config__.show().encode()).hexdigest()[:16]],
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "precision": [torch.get_float32_matmul_precision(), bool(matmul.allow_bf16_reduced_precision_reduction)],
        "libraries": [transformers.__version__, *(_installed(name) for name in ("numba", "triton"))],
    }


@functools.cache
def code_digest() -> str:
    """Digest of the source of this package's arithmetic, so that a changed kernel never meets the rows of the old one."""
    home = Path(vericache_core.__file__).parent
    sha = hashlib.sha256()
    for folder in ("attention", "model"):
        for file in sorted((home / folder).glob("*.py")):
            sha.update(digest("source", folder, file.name, file.read_bytes()))
    return sha.hexdigest()[:32]


def _tensors(model: Any) -> Iterable[tuple[str, Tensor]]:
    """Parameters and buffers (also those that are never saved, such as rotary frequencies)."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version  # noqa: SLF001 (torch has no other name for it)


def _blocks(tensor: Tensor) -> list[Tensor]:
    """Views of at most ``BLOCK`` bytes; a tensor without elements has none."""
    flat = tensor.detach().reshape(-1)
    step = max(1, BLOCK // flat.element_size())
    return [flat[start : start + step] for start in range(0, flat.numel(), step)]


def _hash(block: Tensor) -> bytes:
    return hashlib.sha256(block.contiguous().cpu().view(torch.uint8).numpy().data).digest()


def _shape(layer: LayerDescriptor) -> list[Any]:
    sizes = [layer.heads, layer.kv_heads, layer.head_dim, layer.value_dim]
    return [layer.kind, *sizes, float(layer.scaling).hex(), layer.sliding_window]


def _rotary(layers: Sequence[LayerDescriptor]) -> list[Any]:
    return [[None if layer.rope_theta is None else float(layer.rope_theta).hex(), layer.rotary_dim] for layer in layers]


def _meaningful(settings: Mapping[str, Any]) -> dict[str, Any]:
    skipped = {*NAMED_APART, *MEANINGLESS}
    return {
        name: _meaningful(value) if isinstance(value, Mapping) else value
        for name, value in settings.items()
        if name not in skipped and not str(name).startswith("_")
    }


def _installed(name: str) -> str:
    import importlib.metadata

    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return f"no {name}"


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
