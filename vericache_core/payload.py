"""Compressed KV as bytes: a digest, then safetensors with a JSON header. No pickle.

Layout: 8 bytes magic, 32 bytes SHA-256 of the rest, then a safetensors file whose metadata key
``vericache`` holds everything that rebuilding needs. Any doubt is a ``PayloadError``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from vericache_core.errors import PayloadError, UnknownCompressorError, UsageError
from vericache_core.index_map import HeadMap
from vericache_core.kv import CompressedKV, LayerDescriptor, StoredLayer

if TYPE_CHECKING:
    from vericache_core.compressor import Compressor

MAGIC = b"VCKVP1\r\n"
FORMAT = 1
_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}


def dump_compressed(compressed: CompressedKV) -> bytes:
    """``CompressedKV`` -> bytes, the same bytes for the same content."""
    tensors: dict[str, Tensor] = {}
    layers: list[dict[str, Any]] = []
    for index, (descriptor, layer) in enumerate(zip(compressed.descriptors, compressed.layers, strict=True)):
        entry: dict[str, Any] = {"descriptor": descriptor_to_json(descriptor), "stored": layer is not None}
        if layer is not None:
            entry |= {"counts": list(layer.surviving.counts), "meta": layer.meta()}
            tensors |= {f"{index}/data/{name}": part for name, part in layer.tensors().items()}
            tensors |= {f"{index}/map/{name}": part for name, part in layer.surviving.named_storage().items()}
        layers.append(entry)
    header = {
        "format": FORMAT,
        "compressor": compressed.compressor,
        "options": dict(compressed.options),
        "extra": dict(compressed.extra),
        "tokens": compressed.tokens,
        "layers": layers,
    }
    metadata = {"vericache": json.dumps(header, sort_keys=True, separators=(",", ":"))}
    body = save_tensors({name: _owned(part) for name, part in tensors.items()}, metadata)
    return MAGIC + hashlib.sha256(body).digest() + body


def load_compressed(
    data: bytes, create: Callable[[str, Any], Compressor] | None = None, device: torch.device | str = "cpu"
) -> CompressedKV:
    """Bytes -> ``CompressedKV`` with its rows on ``device``; ``create`` makes the compressor that the header names.

    By default that is the registry of this process.
    """
    header, tensors = read_payload(data)
    if create is None:
        from vericache_core.plugins.registry import default_registry

        create = default_registry().create
    try:
        restored = _rebuild(header, tensors, create(header["compressor"], header["options"]), torch.device(device))
        restored.check_integrity()
        extra = header["extra"]
    except (UnknownCompressorError, PayloadError):
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError, UsageError) as error:
        raise PayloadError("payload contradicts itself", cause=f"{type(error).__name__}: {error}") from error
    if dict(restored.extra) != extra:
        raise PayloadError(
            f"payload of {header['compressor']!r} was written by another version",
            cause=f"it says {extra}, this one {dict(restored.extra)}",
        )
    return restored


def _rebuild(
    header: Mapping[str, Any], tensors: Mapping[str, Tensor], compressor: Compressor, device: torch.device
) -> CompressedKV:
    stored: list[StoredLayer | None] = []
    descriptors = []
    for index, entry in enumerate(header["layers"]):
        descriptor = descriptor_from_json(entry["descriptor"])
        descriptors.append(descriptor)
        if not entry["stored"]:
            stored.append(None)
            continue
        counts = [int(count) for count in entry["counts"]]
        if len(counts) != descriptor.kv_heads:
            raise ValueError(f"layer {index} has {descriptor.kv_heads} KV heads and {len(counts)} counts")
        surviving = HeadMap.from_storage(counts, header["tokens"], _under(tensors, f"{index}/map/"))
        rows = {name: part.to(device) for name, part in _under(tensors, f"{index}/data/").items()}
        stored.append(StoredLayer(descriptor, surviving, rows, entry["meta"]))
    return compressor.restore(header["tokens"], stored, descriptors)


def read_payload(data: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Check magic, digest and format; return ``(header, tensors)``."""
    if data[: len(MAGIC)] != MAGIC:
        raise PayloadError("not a VeriCache payload", cause="magic bytes are missing")
    digest, body = data[len(MAGIC) : len(MAGIC) + 32], data[len(MAGIC) + 32 :]
    if hashlib.sha256(body).digest() != digest:
        raise PayloadError("payload is corrupt or truncated", cause="its SHA-256 does not match")
    try:
        length = int.from_bytes(body[:8], "little")
        header = json.loads(json.loads(body[8 : 8 + length])["__metadata__"]["vericache"])
        tensors = load_tensors(body)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise PayloadError("payload is not valid safetensors", cause=str(error)) from error
    if not isinstance(header, dict):
        raise PayloadError("payload header is not a table")
    if header.get("format") != FORMAT:
        raise PayloadError(
            f"payload format {header.get('format')!r} is not supported", hint=f"this version reads format {FORMAT}"
        )
    return header, tensors


def descriptor_to_json(layer: LayerDescriptor) -> dict[str, Any]:
    """A descriptor as JSON types; the dtype by its torch name."""
    plain = {name: getattr(layer, name) for name in LayerDescriptor.__slots__}
    return plain | {"dtype": str(layer.dtype).removeprefix("torch.")}


def descriptor_from_json(plain: Mapping[str, Any]) -> LayerDescriptor:
    """Inverse of :func:`descriptor_to_json`; raises ``KeyError`` or ``TypeError`` for anything else."""
    return LayerDescriptor(**{**plain, "dtype": _DTYPES[plain["dtype"]]})


def _owned(tensor: Tensor) -> Tensor:
    """A contiguous CPU tensor that shares its storage with nothing, as safetensors wants."""
    ready = tensor.detach().cpu().contiguous()
    return ready if ready.untyped_storage().nbytes() == ready.nbytes else ready.clone()


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name[len(prefix) :]: part for name, part in tensors.items() if name.startswith(prefix)}
