"""Blobs as bytes: magic, a bounded JSON header with its checksum, then safetensors with a checksum in the header.

====================  =======================================================
8 bytes               magic
4 bytes               length of the header, little-endian
32 bytes              SHA-256 of the header
header                JSON: role, key, identity, chunk, codec, payload length and SHA-256
payload               full KV: a safetensors file; compressed KV: what ``CompressedKV.to_payload`` gives
====================  =======================================================

What a store returns is not trusted: lengths, names, dtypes, shapes and offsets are all compared with what is expected
before anything is allocated, and nothing in a blob is ever executed. Any doubt is a ``PayloadError``. Tensors are read
where they lie (``safetensors`` itself reads only ``bytes``, a copy); the layout is its published one.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from vericache_core.errors import PayloadError
from vericache_core.stores.blobs import Buffer
from vericache_core.stores.identity import EXACT, FORMAT, PrefixIdentity, canonical

MAGIC = b"VCBLOB1\n"
MAX_HEADER = 1 << 20
MAX_TENSOR_HEADER = 8 << 20
_PREFIX = struct.Struct("<8sI32s")
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Dtypes of KV rows, by their safetensors names."""

Role = Literal["full", "compressed"]


@dataclass(frozen=True)
class TensorSpec:
    """Dtype by its safetensors name, and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class BlobHeader:
    """What a blob says of itself.

    Attributes:
        role: whether this may stand for the full KV.
        key: under which it was stored; a blob that lies under another key is refused.
        fields: public digests of the identity, see :meth:`PrefixIdentity.public`.
        chunk: number of the chunk in its prefix; 0 for compressed KV.
        tokens: tokens of the chunk, or of the compressed prefix.
        codec: ``raw`` for full KV, else the compressor.
        options: of the codec.
    """

    role: Role
    key: str
    fields: Mapping[str, str]
    chunk: int
    tokens: int
    codec: str
    options: Mapping[str, Any]


def encode_blob(header: BlobHeader, payload: Sequence[Buffer]) -> list[Buffer]:
    """The parts of a blob, the payload's own uncopied.

    Raises:
        PayloadError: full KV through a codec that may lose bits, or a header that is too large.
    """
    _check_role(header)
    sha = hashlib.sha256()
    for part in payload:
        sha.update(part)
    plain = {
        "format": FORMAT,
        "role": header.role,
        "key": header.key,
        "identity": dict(header.fields),
        "chunk": header.chunk,
        "tokens": header.tokens,
        "codec": {"id": header.codec, "options": dict(header.options)},
        "payload": {"bytes": sum(memoryview(part).nbytes for part in payload), "sha256": sha.hexdigest()},
    }
    text = canonical(plain).encode()
    if len(text) > MAX_HEADER:
        raise PayloadError("a blob's header is too large", cause=f"{len(text)} bytes, at most {MAX_HEADER}")
    return [_PREFIX.pack(MAGIC, len(text), hashlib.sha256(text).digest()) + text, *payload]


def decode_blob(blob: memoryview, expected: BlobHeader) -> memoryview:
    """The payload of ``blob``, checked, where it lies.

    Args:
        blob: what the store returned.
        expected: what the header must say, field for field.

    Raises:
        PayloadError: anything is not as expected; the message names it.
    """
    _check_role(expected)
    if blob.nbytes < _PREFIX.size:
        raise PayloadError("a blob is truncated", cause=f"{blob.nbytes} bytes")
    magic, length, checksum = _PREFIX.unpack_from(blob)
    if magic != MAGIC:
        raise PayloadError("not a blob of this store", cause="magic bytes are missing")
    if length > MAX_HEADER or length > blob.nbytes - _PREFIX.size:
        raise PayloadError("a blob is truncated or its header too large", cause=f"header of {length} bytes")
    text = bytes(blob[_PREFIX.size : _PREFIX.size + length])
    if hashlib.sha256(text).digest() != checksum:
        raise PayloadError("a blob's header is corrupt", cause="its SHA-256 does not match")
    plain = _table(text)
    found: dict[str, Any] = {
        "format": plain.get("format"),
        "role": plain.get("role"),
        "key": plain.get("key"),
        "identity": plain.get("identity"),
        "chunk": plain.get("chunk"),
        "tokens": plain.get("tokens"),
        "codec": plain.get("codec"),
    }
    wanted = {
        "format": FORMAT,
        "role": expected.role,
        "key": expected.key,
        "identity": dict(expected.fields),
        "chunk": expected.chunk,
        "tokens": expected.tokens,
        "codec": {"id": expected.codec, "options": dict(expected.options)},
    }
    wrong = [name for name in wanted if found[name] != wanted[name]]
    if wrong:
        raise PayloadError("a blob is not the one that was asked for", cause=f"{', '.join(wrong)} differ")
    facts = plain.get("payload")
    payload = blob[_PREFIX.size + length :]
    if not isinstance(facts, dict) or facts.get("bytes") != payload.nbytes:
        raise PayloadError("a blob is truncated or too long", cause=f"{payload.nbytes} bytes of payload")
    if hashlib.sha256(payload).hexdigest() != facts.get("sha256"):
        raise PayloadError("a blob's payload is corrupt", cause="its SHA-256 does not match")
    return payload


def encode_tensors(tensors: Mapping[str, tuple[TensorSpec, Buffer]]) -> list[Buffer]:
    """A safetensors file in parts, the tensors' bytes uncopied."""
    table: dict[str, Any] = {}
    offset = 0
    for name, (spec, data) in tensors.items():
        if memoryview(data).nbytes != spec.nbytes:
            raise PayloadError(f"tensor {name!r} has {memoryview(data).nbytes} bytes, its shape says {spec.nbytes}")
        table[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offset, offset + spec.nbytes]}
        offset += spec.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [struct.pack("<Q", len(text)) + text, *(data for _, data in tensors.values())]


def decode_tensors(payload: memoryview, expected: Mapping[str, TensorSpec]) -> dict[str, memoryview]:
    """The bytes of each tensor of a safetensors file, where they lie.

    Raises:
        PayloadError: other tensors than expected, or offsets that overlap, leave gaps or point outside.
    """
    if payload.nbytes < 8:
        raise PayloadError("a payload is truncated", cause=f"{payload.nbytes} bytes")
    (length,) = struct.unpack_from("<Q", payload)
    if length > MAX_TENSOR_HEADER or length > payload.nbytes - 8:
        raise PayloadError("a payload is truncated or its header too large", cause=f"header of {length} bytes")
    table = _table(bytes(payload[8 : 8 + length]))
    table.pop("__metadata__", None)
    if table.keys() != expected.keys():
        odd = sorted(table.keys() ^ expected.keys())
        raise PayloadError("a payload holds other tensors than it should", cause=", ".join(odd[:4]))
    data = payload[8 + length :]
    spans: list[tuple[int, int, str]] = []
    for name, spec in expected.items():
        entry = table[name]
        if not isinstance(entry, dict) or entry.get("dtype") != spec.dtype or entry.get("shape") != list(spec.shape):
            raise PayloadError(f"tensor {name!r} is not {spec.dtype} {list(spec.shape)}", cause=str(entry)[:100])
        start, stop = _offsets(name, entry.get("data_offsets"))
        if not 0 <= start <= stop <= data.nbytes or stop - start != spec.nbytes:
            raise PayloadError(f"tensor {name!r} does not lie within the payload", cause=f"bytes {start} to {stop}")
        spans.append((start, stop, name))
    end = 0
    for start, stop, name in sorted(spans):
        if start != end:
            raise PayloadError(f"tensor {name!r} overlaps another or leaves a gap", cause=f"begins at {start}, not {end}")
        end = stop
    if end != data.nbytes:
        raise PayloadError("a payload is too long", cause=f"{data.nbytes - end} bytes after the last tensor")
    return {name: data[start:stop] for start, stop, name in spans}


def full_header(identity: PrefixIdentity, key: str, chunk: int, tokens: int) -> BlobHeader:
    """The header of one chunk of full KV."""
    return BlobHeader("full", key, identity.public(), chunk, tokens, EXACT, {})


def compressed_header(
    identity: PrefixIdentity, key: str, tokens: int, compressor: str, options: Mapping[str, Any]
) -> BlobHeader:
    """The header of the compressed KV of ``tokens`` tokens."""
    return BlobHeader("compressed", key, identity.public(), 0, tokens, compressor, options)


def _check_role(header: BlobHeader) -> None:
    """Full KV has the exact codec and a key of its own namespace, compressed KV neither."""
    namespace = header.key.split("-", 1)[0]
    if (header.role == "full") != (header.codec == EXACT) or namespace != header.role:
        raise PayloadError(
            f"a blob of codec {header.codec!r} under {namespace!r} cannot be {header.role} KV",
            cause="full KV is stored bit for bit, in a namespace of its own",
        )


def _table(text: bytes) -> dict[str, Any]:
    try:
        plain = json.loads(text.decode("ascii"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise PayloadError("a header is not valid JSON", cause=str(error)[:100]) from error
    if not isinstance(plain, dict):
        raise PayloadError("a header is not a table")
    return cast("dict[str, Any]", plain)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name appears twice")
    return table


def _offsets(name: str, value: Any) -> tuple[int, int]:
    if not (isinstance(value, list) and len(value) == 2 and all(type(item) is int for item in value)):
        raise PayloadError(f"tensor {name!r} has no offsets", cause=str(value)[:100])
    return value[0], value[1]
