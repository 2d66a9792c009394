from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vericache_core.packing import SUPPORTED_BITS, pack, packed_size, unpack

BITS = st.sampled_from(SUPPORTED_BITS)


@st.composite
def some_codes(draw: st.DrawFn) -> tuple[int, torch.Tensor]:
    bits = draw(BITS)
    outer = draw(st.lists(st.integers(0, 3), max_size=2))
    count = draw(st.integers(0, 70))
    seed = draw(st.integers(0, 999))
    codes = torch.randint(0, 1 << bits, (*outer, count), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return bits, codes


def as_integer(codes: list[int], bits: int) -> bytes:
    """The naive definition: one little-endian integer whose lowest bits are the first code."""
    number = sum(code << bits * place for place, code in enumerate(codes))
    return number.to_bytes(packed_size(len(codes), bits), "little")


@given(some_codes())
def test_round_trip_and_size(case: tuple[int, torch.Tensor]) -> None:
    bits, codes = case
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (*codes.shape[:-1], packed_size(codes.shape[-1], bits))
    assert torch.equal(unpack(packed, bits, codes.shape[-1]), codes)


@given(BITS, st.lists(st.integers(0, 255), max_size=40))
def test_bytes_are_those_of_one_little_endian_integer(bits: int, raw: list[int]) -> None:
    codes = [code % (1 << bits) for code in raw]
    packed = pack(torch.tensor(codes, dtype=torch.uint8), bits)
    assert bytes(packed.tolist()) == as_integer(codes, bits)


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_every_code_in_every_lane(bits: int) -> None:
    for count in range(1, 18):
        for lane in range(count):
            codes = torch.zeros((1 << bits, count), dtype=torch.uint8)
            codes[:, lane] = torch.arange(1 << bits)
            assert torch.equal(unpack(pack(codes, bits), bits, count), codes)


@pytest.mark.parametrize(
    ("bits", "codes", "golden"),
    [
        (1, [1, 0, 1, 1, 0, 0, 0, 1, 1], "8d01"),
        (2, [0, 1, 2, 3, 3], "e403"),
        (3, [1, 2, 3, 4, 5, 6, 7, 0, 7], "d1581f07"),
        (4, [1, 2, 15], "210f"),
        (8, [0, 255, 7], "00ff07"),
    ],
)
def test_golden_bytes(bits: int, codes: list[int], golden: str) -> None:
    assert bytes(pack(torch.tensor(codes, dtype=torch.uint8), bits).tolist()) == bytes.fromhex(golden)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_a_code_too_large_is_refused(bits: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        pack(torch.tensor([0, 1 << bits], dtype=torch.uint8), bits)


def test_bad_widths_and_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="bits must be"):
        pack(torch.zeros(8, dtype=torch.uint8), 5)
    with pytest.raises(ValueError, match="uint8"):
        pack(torch.zeros(8, dtype=torch.int64), 4)
    with pytest.raises(ValueError, match="take 2 bytes"):
        unpack(torch.zeros(3, dtype=torch.uint8), 4, 4)


def test_strided_input_and_no_change_to_it() -> None:
    base = torch.randint(0, 8, (9, 5), dtype=torch.uint8)
    before = base.clone()
    packed = pack(base.T, 3)
    assert torch.equal(packed, pack(base.T.contiguous(), 3))
    assert torch.equal(unpack(packed, 3, 9), base.T)
    whole = pack(base, 8)
    whole.zero_()
    assert torch.equal(base, before)
