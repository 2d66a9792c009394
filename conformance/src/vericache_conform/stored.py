"""Looking at a compressed KV from outside: its bytes, its rows, what it answers. Shares no code with the SDK's own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from vericache_core.attention.online import AttentionState
from vericache_core.coded import CodedLayer
from vericache_core.kv import CompressedKV, CompressedLayer, PlainLayer


def tensor_bytes(tensor: Tensor) -> bytes:
    """The content of a tensor, row-major, bit for bit."""
    flat = tensor.detach().cpu().contiguous()
    return flat.reshape(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def fingerprint(compressed: CompressedKV) -> str:
    """SHA-256 over everything that is stored: names, shapes, dtypes, maps, meta, bytes, options."""
    digest = hashlib.sha256()

    def put(*parts: Any) -> None:
        digest.update(json.dumps(parts, sort_keys=True, default=str).encode())

    put(compressed.compressor, dict(compressed.options), compressed.tokens, dict(compressed.extra), len(compressed.layers))
    for layer in compressed.layers:
        if layer is None:
            put("declined")
            continue
        put(layer.tokens, list(layer.surviving.counts), dict(layer.meta()))
        for head in range(layer.surviving.kv_heads):
            digest.update(tensor_bytes(layer.surviving.head(head)))
        for name, tensor in sorted(layer.tensors().items()):
            put(name, str(tensor.dtype), list(tensor.shape))
            digest.update(tensor_bytes(tensor))
    return digest.hexdigest()


def stored_layers(compressed: CompressedKV) -> Iterator[tuple[int, CompressedLayer]]:
    """The layers that were compressed, with their numbers."""
    for index, layer in enumerate(compressed.layers):
        if layer is not None:
            yield index, layer


def dense_rows(layer: CompressedLayer) -> list[tuple[Tensor, Tensor]] | None:
    """Per KV head ``(keys [kept, head_dim], values [kept, value_dim])`` as stored; None for a layer of a form of its own."""
    if isinstance(layer, PlainLayer):
        found, start = [], 0
        for count in layer.surviving.counts:
            found.append((layer.flat_keys[start : start + count], layer.flat_values[start : start + count]))
            start += count
        return found
    if isinstance(layer, CodedLayer):
        keys, values = _stream(layer.keys), _stream(layer.values)
        return [(keys[head], values[head]) for head in range(keys.shape[0])]
    return None


def _stream(rows: Any) -> Tensor:
    parts = [rows.codec.decode(segment.codes)[:, : segment.tokens].float() for segment in rows.segments]
    return torch.cat([*parts, rows.exact.float()], 1)


def attend(layer: CompressedLayer, query: Tensor) -> Tensor:
    """What ``query`` (``[heads, rows, head_dim]`` float32, scaled) reads from the compressed prefix alone."""
    state = AttentionState.fresh(query.shape[0], query.shape[1], _value_dim(layer))
    layer.attend(query, state)
    return state.output()


def _value_dim(layer: CompressedLayer) -> int:
    rows = dense_rows(layer)
    if rows is not None:
        return int(rows[0][1].shape[-1])
    return int(getattr(layer, "value_dim", 0)) or max(int(part.shape[-1]) for part in layer.tensors().values())


def softmax_attention(query: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None = None) -> Tensor:
    """Plain attention in float64: ``query [rows, head_dim]``, ``keys [n, head_dim]``, ``hidden [n]`` or ``[rows, n]``."""
    scores = query.double() @ keys.double().T
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    return torch.softmax(scores, -1) @ values.double()


def reachable_tensors(root: Any) -> dict[int, Tensor]:
    """Every tensor that the object graph under ``root`` holds, by storage address; classes and modules are not entered."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, (str, bytes, int, float, bool, type)) or item is None:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            if item.numel():
                found[item.untyped_storage().data_ptr()] = item
            continue
        waiting.extend(_parts(item))
    return found


def _parts(item: Any) -> list[Any]:
    if isinstance(item, Mapping):
        return list(item.values())
    if isinstance(item, (list, tuple, set, frozenset)):
        return list(item)
    parts = [cell.cell_contents for cell in getattr(item, "__closure__", None) or ()]
    parts.append(getattr(item, "__self__", None))
    parts.extend(getattr(item, "__dict__", {}).values() if not hasattr(item, "__spec__") else ())
    for base in type(item).__mro__:
        slots = base.__dict__.get("__slots__", ())
        parts.extend(getattr(item, slot, None) for slot in ((slots,) if isinstance(slots, str) else slots))
    return parts


def storage_total(tensors: Any) -> int:
    """Bytes of the distinct storages behind ``tensors``."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}.values())
