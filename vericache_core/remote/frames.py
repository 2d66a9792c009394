"""Messages of the remote protocol: a small JSON header, raw bytes behind it, and a digest over both. No pickle.

Layout: 4 bytes magic, 4 bytes length of the header (little endian), the header as UTF-8 JSON, the payload, 16 bytes
BLAKE2b of everything before. TCP's own checksum is 16 bits wide; a flipped bit in a verdict would be a wrong token,
so each message carries a digest of its own. It guards against accidents; TLS guards against people.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import numpy as np

from vericache_core.errors import RemoteError

MAGIC: Final = b"VCR1"
PROTOCOL: Final = 2
"""Version of everything that crosses the link; sides of different versions refuse each other by name."""
SERVICE: Final = "vericache.Store"
"""Name of the gRPC service."""
MOST_HEADER: Final = 1 << 18
CHUNK: Final = 1 << 18
"""Bytes of payload in a part of a blob: small enough that a verdict is never far behind one."""
MOST_MESSAGE: Final = 8 << 20
"""Bytes of the largest message that either side takes in."""
_DIGEST: Final = 16


class BadMessageError(RemoteError):
    """What came over the link is no message, or holds what it may not hold."""


@dataclass(frozen=True)
class Message:
    """One message: ``kind``, further header fields, payload. The getters refuse what is missing or of another form."""

    kind: str
    fields: dict[str, Any]
    payload: bytes = b""

    def encode(self) -> bytes:
        """Return the bytes that :func:`decode` reads."""
        header = json.dumps({"kind": self.kind, **self.fields}, separators=(",", ":")).encode()
        body = b"".join((MAGIC, len(header).to_bytes(4, "little"), header, self.payload))
        return body + hashlib.blake2b(body, digest_size=_DIGEST).digest()

    def text(self, name: str, most: int = 4096) -> str:
        """A string of at most ``most`` characters."""
        value = self.fields.get(name)
        if not isinstance(value, str) or len(value) > most:
            self._refuse(name, f"text of at most {most} characters")
        return value

    def number(self, name: str, low: int, high: int) -> int:
        """An integer in ``[low, high]``."""
        value = self.fields.get(name)
        if type(value) is not int or not low <= value <= high:
            self._refuse(name, f"an integer from {low} to {high}")
        return value

    def numbers(self, name: str, low: int, high: int, most: int) -> list[int]:
        """At most ``most`` integers in ``[low, high]``."""
        value = self.fields.get(name)
        if not isinstance(value, list) or len(value) > most:
            self._refuse(name, f"a list of at most {most}")
        if any(type(item) is not int or not low <= item <= high for item in value):
            self._refuse(name, f"integers from {low} to {high}")
        return value

    def table(self, name: str) -> dict[str, Any]:
        """A JSON object."""
        value = self.fields.get(name)
        if not isinstance(value, dict):
            self._refuse(name, "a table")
        return value

    def expect(self, *kinds: str) -> Message:
        """Return the message if it is of one of ``kinds``."""
        if self.kind not in kinds:
            raise BadMessageError(f"the other side sent {self.kind[:40]!r} where {' or '.join(kinds)} was due")
        return self

    def _refuse(self, name: str, wanted: str) -> NoReturn:
        raise BadMessageError(f"message {self.kind[:40]!r}: {name} is not {wanted}")


def decode(data: bytes) -> Message:
    """Check digest and form of a message.

    Raises:
        BadMessageError: it is not one of ours, corrupt, cut or too large.
    """
    if len(data) > MOST_MESSAGE:
        raise BadMessageError(f"a message of {len(data)} bytes", cause=f"at most {MOST_MESSAGE} are taken")
    if len(data) < 8 + _DIGEST or data[:4] != MAGIC:
        raise BadMessageError("not a message of this protocol", cause="magic bytes are missing")
    if hashlib.blake2b(memoryview(data)[:-_DIGEST], digest_size=_DIGEST).digest() != data[-_DIGEST:]:
        raise BadMessageError("a message is corrupt or cut", cause="its digest does not match")
    length = int.from_bytes(data[4:8], "little")
    if length > min(MOST_HEADER, len(data) - 8 - _DIGEST):
        raise BadMessageError("a message is malformed", cause=f"its header claims {length} bytes")
    try:
        fields = json.loads(data[8 : 8 + length].decode())
    except (ValueError, RecursionError) as error:
        raise BadMessageError("a message is malformed", cause=f"its header is no JSON: {type(error).__name__}") from error
    kind = fields.pop("kind", None) if isinstance(fields, dict) else None
    if not isinstance(kind, str):
        raise BadMessageError("a message is malformed", cause="its header names no kind")
    return Message(kind, fields, bytes(memoryview(data)[8 + length : -_DIGEST]))


def ids_to_bytes(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32."""
    return np.asarray(ids, dtype="<i4").tobytes()


def ids_from_bytes(data: bytes, vocab: int, most: int) -> list[int]:
    """Inverse of :func:`ids_to_bytes`.

    Raises:
        BadMessageError: too many, or an id outside of ``[0, vocab)``.
    """
    if len(data) % 4 or len(data) > 4 * most:
        raise BadMessageError(f"{len(data)} bytes of token ids", cause=f"at most {most} ids of 4 bytes are taken")
    ids = np.frombuffer(data, dtype="<i4")
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= vocab):
        raise BadMessageError("a token id lies outside of the vocabulary", cause=f"it has {vocab} entries")
    found: list[int] = ids.tolist()
    return found


class RunningDigest:
    """Digest over a growing sequence of token ids, by which both sides notice that they have drifted apart."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._hash = hashlib.blake2b(ids_to_bytes(ids), digest_size=8)

    def after(self, ids: Sequence[int]) -> tuple[RunningDigest, str]:
        """``(digest object, hex)`` after ``ids`` more; this one stays as it is."""
        other = RunningDigest(())
        other._hash = self._hash.copy()  # its own class
        other._hash.update(ids_to_bytes(ids))
        return other, other._hash.hexdigest()
