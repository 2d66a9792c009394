"""Scores as bytes, and a directory of them: the offline form, scored once and used for any budget.

A file is 8 bytes magic, the SHA-256 of the rest, and a safetensors body whose metadata holds the key of what
was scored. Any doubt about a file is a miss and the passes run again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from vericache_core import LayerDescriptor, PrefixView
from vericache_core.errors import PayloadError

MAGIC = b"VCKVZP1\n"


def fingerprint(prefix: PrefixView, layers: Sequence[LayerDescriptor], always: Tensor, settings: str) -> str:
    """Name of what is scored: token ids, the bits of all keys (hence the model), protected positions, settings."""
    digest = hashlib.sha256(settings.encode())
    digest.update(json.dumps([list(prefix.token_ids), always.tolist()]).encode())
    for layer in layers:
        digest.update(repr(layer).encode())
        digest.update(prefix.keys(layer.index).cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def dump_scores(scores: Mapping[int, Tensor], key: str) -> bytes:
    """Scores by layer number, float32 ``[kv_heads, tokens]``, as bytes; ``key`` says what they belong to."""
    body = save_tensors({str(index): score.contiguous() for index, score in scores.items()}, {"key": key})
    return MAGIC + hashlib.sha256(body).digest() + body


def load_scores(data: bytes, key: str) -> dict[int, Tensor]:
    """Inverse of :func:`dump_scores`.

    Raises:
        PayloadError: damaged, not scores, or those of something else than ``key``.
    """
    start = len(MAGIC) + 32
    body = data[start:]
    if data[: len(MAGIC)] != MAGIC or hashlib.sha256(body).digest() != data[len(MAGIC) : start]:
        raise PayloadError("not intact KVzip scores", cause="magic bytes or SHA-256 do not match")
    try:
        header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
        stored, scores = header["__metadata__"]["key"], {int(name): part for name, part in load_tensors(body).items()}
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise PayloadError("not valid KVzip scores", cause=str(error)) from error
    if stored != key:
        raise PayloadError("these KVzip scores belong to another prefix, model or setting")
    return scores


def read(directory: Path, key: str) -> dict[int, Tensor] | None:
    """Scores from the directory; ``None`` if there are none or they cannot be trusted."""
    try:
        return load_scores((directory / f"{key}.kvzip").read_bytes(), key)
    except (OSError, PayloadError):
        return None


def write(directory: Path, key: str, scores: Mapping[int, Tensor]) -> None:
    """Put scores into the directory, all or nothing; a full disk is no reason to fail."""
    temporary = None
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=directory, suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(dump_scores(scores, key))
        Path(temporary).replace(directory / f"{key}.kvzip")
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
