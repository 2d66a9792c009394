from __future__ import annotations

import os

import numpy as np
import pytest

from vericache_core.errors import StoreError, UsageError
from vericache_core.stores.keys import check_key
from vericache_core.stores.pieces import PIECE, TAG_BYTES, blob_size, check_tag, cut, ranges

ROOM = PIECE - TAG_BYTES


@pytest.mark.parametrize("size", [0, 1, ROOM - 1, ROOM, ROOM + 1, 2 * ROOM, 2 * ROOM + 7])
@pytest.mark.parametrize("step", [1 << 30, 999_983])
def test_pieces_come_together_to_the_blob(size: int, step: int) -> None:
    blob = os.urandom(size)
    parts = [memoryview(blob)[at : at + step] for at in range(0, size, step)]
    stored = b"".join(cut("k", parts))
    assert blob_size(len(stored)) == size
    found = bytearray(size)
    for number, (first, last, start, end) in enumerate(ranges(size)):
        piece = stored[first : last + 1]
        check_tag(piece[:TAG_BYTES], "k", number, size)
        found[start:end] = piece[TAG_BYTES:]
    assert found == blob
    assert last + 1 == len(stored)


def test_parts_of_any_format_are_cut_as_bytes() -> None:
    floats = np.arange(5, dtype=np.float64)
    assert b"".join(cut("k", [floats.data, b"x"]))[TAG_BYTES:] == floats.tobytes() + b"x"


@pytest.mark.fault("flip", "each byte of a tag of Redis")
def test_every_flipped_byte_of_a_tag_is_noticed() -> None:
    tag = bytearray(cut("k", [b"abc"])[0])
    for at in range(TAG_BYTES):
        tag[at] ^= 1
        with pytest.raises(StoreError):
            check_tag(tag, "k", 0, 3)
        tag[at] ^= 1
    check_tag(tag, "k", 0, 3)


@pytest.mark.fault("paths", "keys of Redis")
@pytest.mark.parametrize("key", ["", "A", "a/b", "../x", "a\0", "ä", "a\n", "a" * 129, "a:b"])
def test_keys_that_are_none_are_refused(key: str) -> None:
    with pytest.raises(UsageError):
        check_key(key)


def test_keys_that_are_keys() -> None:
    for key in ("a", "0", "kivi-" + "0f" * 32, "a" * 128):
        assert check_key(key) == key
