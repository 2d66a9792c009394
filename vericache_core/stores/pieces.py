"""A blob cut into pieces that each say which piece of which blob they are.

Connections get out of step, proxies mix up replies: bytes that come back for a request may be those of another one.
Each piece begins with a tag of 32 bytes (magic, digest of the key, number of the piece, bytes of the blob), so whoever
puts the pieces together notices without reading the rest twice. Against flipped bits the payload has its own checksums.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import Final

from vericache_core.errors import StoreError
from vericache_core.stores.blobs import Buffer

PIECE: Final = 1 << 20
"""Bytes of every piece but the last, tag included."""

_TAG: Final = struct.Struct("<4s12sQQ")
TAG_BYTES: Final = _TAG.size
_ROOM: Final = PIECE - TAG_BYTES


def length_of(part: Buffer) -> int:
    """Bytes of a part of a blob."""
    return part.nbytes if isinstance(part, memoryview) else len(part)


def cut(key: str, parts: Sequence[Buffer]) -> list[Buffer]:
    """What is to be stored: tags, and between them the parts, in slices that copy nothing."""
    return [buffer for piece in pieces_of(key, parts) for buffer in piece]


def pieces_of(key: str, parts: Sequence[Buffer]) -> Iterator[list[Buffer]]:
    """Each piece: its tag, then slices of the parts."""
    size = sum(map(length_of, parts))
    number, room = 0, _ROOM
    piece: list[Buffer] = [tag_of(key, 0, size)]
    for part in parts:
        view = memoryview(part).cast("B")
        while len(view):
            if room == 0:
                yield piece
                number, room = number + 1, _ROOM
                piece = [tag_of(key, number, size)]
            piece.append(view[:room])
            taken = min(room, len(view))
            view, room = view[taken:], room - taken
    yield piece


def blob_size(stored: int) -> int:
    """Bytes of the blob of which ``stored`` bytes are stored; negative where no blob has that many."""
    return stored - TAG_BYTES * max(1, -(-stored // PIECE))


def ranges(size: int) -> Iterator[tuple[int, int, int, int]]:
    """For each piece of a blob of ``size`` bytes: first and last byte as stored, both included, and its slice of the blob."""
    for number, start in enumerate(range(0, max(size, 1), _ROOM)):
        end = min(start + _ROOM, size)
        yield number * PIECE, number * PIECE + TAG_BYTES + end - start - 1, start, end


def tag_of(key: str, number: int, size: int) -> bytes:
    """The tag of a piece."""
    return _TAG.pack(b"VCB1", hashlib.sha256(key.encode()).digest()[:12], number, size)


def read_tag(found: Buffer, key: str) -> tuple[int, int]:
    """Number and size of a tag of ``key``; ``StoreError`` when it is none."""
    magic, digest, number, size = _TAG.unpack(found)
    if (magic, digest) != _TAG.unpack(tag_of(key, 0, 0))[:2]:
        raise StoreError("the store answered with something else than the blob that was asked for")
    return number, size


def check_tag(found: Buffer, key: str, number: int, size: int) -> None:
    """Raise ``StoreError`` unless this is the tag of that piece."""
    if found != tag_of(key, number, size):
        raise StoreError("the store answered with something else than the piece of the blob that was asked for")
