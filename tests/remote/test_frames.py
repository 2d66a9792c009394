"""Messages: what is read is what was written, and nothing else is read at all."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from tests.fault_table import Tally
from vericache_core.errors import RemoteError
from vericache_core.remote.frames import (
    MAGIC,
    MOST_MESSAGE,
    Message,
    RunningDigest,
    decode,
    ids_from_bytes,
    ids_to_bytes,
)

MESSAGE = Message("verdict", {"session": "ab", "seq": 3, "base": 7, "tokens": [1, 2]}, b"payload")


def test_round_trip() -> None:
    assert decode(MESSAGE.encode()) == MESSAGE


@pytest.mark.fault("flip", "each bit of a message, and each cut")
def test_every_flipped_bit_and_every_cut_is_noticed(tally: Tally) -> None:
    data = MESSAGE.encode()
    tally.add(len(data) * 9 + 1)  # a byte has eight bits, and each is once the first that is missing
    for at in range(len(data) * 8):
        changed = bytearray(data)
        changed[at // 8] ^= 1 << at % 8
        with pytest.raises(RemoteError):
            decode(bytes(changed))
    for length in range(len(data)):
        with pytest.raises(RemoteError):
            decode(data[:length])
    with pytest.raises(RemoteError):
        decode(data + b"x")


class Canary:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("a pickle was loaded",))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(pickle.dumps(Canary()), id="pickle", marks=pytest.mark.fault("pickle", "as a message")),
        pytest.param(b"\x00" * 100, id="zeros", marks=pytest.mark.fault("nonsense", "as a message")),
        pytest.param(
            MAGIC + b"\xff\xff\xff\xff" + b"\x00" * 40, id="4 GiB of header", marks=pytest.mark.fault("headers", "of a message")
        ),
        pytest.param(b"x" * (MOST_MESSAGE + 1), id="too long", marks=pytest.mark.fault("headers", "of a message")),
    ],
)
def test_what_is_no_message(data: bytes) -> None:
    with pytest.raises(RemoteError):
        decode(data)


@pytest.mark.fault("headers", "of a message, with a digest that fits")
@pytest.mark.parametrize("header", ["[1]", "nonsense", "{}", '{"kind": 3}', "[" * 10_000, '{"kind": "a", "x": NaN'])
def test_headers_that_are_none(header: str) -> None:
    import hashlib

    body = MAGIC + len(header).to_bytes(4, "little") + header.encode()
    with pytest.raises(RemoteError):
        decode(body + hashlib.blake2b(body, digest_size=16).digest())


@pytest.mark.parametrize("value", [None, "1", 1.0, True, [1], -1, 11])
def test_numbers_are_numbers(value: Any) -> None:
    with pytest.raises(RemoteError, match="n is not"):
        Message("m", {"n": value}).number("n", 0, 10)


@pytest.mark.parametrize("value", [None, "12", [1, "2"], [1, 2.0], [True], [1, 11], [0] * 6, {"a": 1}])
def test_lists_are_lists_of_numbers(value: Any) -> None:
    with pytest.raises(RemoteError, match="n is not"):
        Message("m", {"n": value}).numbers("n", 0, 10, 5)


def test_ids() -> None:
    assert ids_from_bytes(ids_to_bytes([0, 5, 9]), 10, 3) == [0, 5, 9]
    for data in (b"abc", ids_to_bytes([10]), ids_to_bytes([-1]), ids_to_bytes([1, 1, 1, 1])):
        with pytest.raises(RemoteError):
            ids_from_bytes(data, 10, 3)


def test_the_running_digest_depends_on_everything_before() -> None:
    start = RunningDigest([1, 2, 3])
    first, one = start.after([4])
    _, both = first.after([5, 6])
    assert start.after([4, 5, 6])[1] == both
    assert len({one, both, start.after([5])[1], RunningDigest([1, 2]).after([4])[1]}) == 4
    assert json.dumps(one)
    # Golden: the same in every process and version of Python.
    assert RunningDigest([1, 2, 3]).after([4])[1] == GOLDEN


GOLDEN = "c87a38f318fafe9d"
