"""Codes against a second, plain implementation written from the paper's description: scalar by scalar."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from vericache_compressor_kivi import KiviCompressor, KiviOptions
from vericache_core import CompressContext, LayerDescriptor, PrefixView
from vericache_core.coded import CodedLayer

F32 = np.float32
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def stored(number: float, dtype: torch.dtype) -> float:
    """Round to the model's dtype, nearest even, by hand: search the two neighbours with exact fractions."""
    if dtype == torch.float32 or number == 0:
        return float(F32(number))
    digits, lowest = {torch.bfloat16: (8, -133), torch.float16: (11, -24)}[dtype]
    exact = Fraction(number)
    exponent = max(math.frexp(number)[1] - digits, lowest)
    unit = Fraction(2) ** exponent
    return float(round(exact / unit) * unit)  # round() of a Fraction is half to even


def group_codes(numbers: list[float], bits: int, dtype: torch.dtype) -> tuple[list[int], float, float]:
    low, high = min(numbers), max(numbers)
    if low == high:
        return [0] * len(numbers), 1.0, low
    scale = stored(float((F32(high) - F32(low)) / F32((1 << bits) - 1)), dtype)
    codes = [round(float((F32(x) - F32(low)) / F32(scale))) for x in numbers]
    return [min(max(code, 0), (1 << bits) - 1) for code in codes], scale, low


def packed(codes: list[int], bits: int) -> bytes:
    """32 / bits codes per little-endian int32 word, the first in the lowest bits."""
    number = 0
    for place, code in enumerate(codes):
        number |= code << bits * place
    return number.to_bytes(len(codes) * bits // 8, "little")


class Streams:
    """All codes of one layer in the order of the paper, as bytes and numbers."""

    def __init__(self, keys: Tensor, values: Tensor, options: KiviOptions) -> None:
        (kv_heads, tokens, dim), group, residual = keys.shape, options.group, options.residual
        self.encoded_keys = 0
        while self.encoded_keys + residual <= tokens:  # a full buffer is encoded and emptied
            self.encoded_keys += residual
        self.encoded_values = len([at for at in range(tokens) if at < tokens - residual])  # the window pushes out the oldest
        dtype = keys.dtype
        key_lists, value_lists = keys.double().tolist(), values.double().tolist()
        self.keys = [
            group_codes([key_lists[head][first + t][channel] for t in range(group)], options.key_width, dtype)
            for head in range(kv_heads)
            for first in range(0, self.encoded_keys, group)
            for channel in range(dim)
        ]
        self.values = [
            group_codes(value_lists[head][token][first : first + group], options.value_width, dtype)
            for head in range(kv_heads)
            for token in range(self.encoded_values)
            for first in range(0, values.shape[2], group)
        ]


def check(tensors: dict[str, Tensor], stream: str, expected: list[tuple[list[int], float, float]], bits: int) -> None:
    if not expected:
        assert not any(name.startswith(f"{stream}.0") for name in tensors)
        return
    made = tensors[f"{stream}.0.codes"]
    assert made.numpy().tobytes() == b"".join(packed(codes, bits) for codes, _, _ in expected)
    assert tensors[f"{stream}.0.scale"].double().flatten().tolist() == [scale for _, scale, _ in expected]
    assert tensors[f"{stream}.0.low"].double().flatten().tolist() == [low for _, _, low in expected]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        KiviOptions(group=8, residual=16),
        KiviOptions(group=16, residual=32, bits=4),
        KiviOptions(group=8, residual=24, key_bits=4, value_bits=2),
        KiviOptions(group=4, residual=8),
    ],
    ids=lambda o: f"k{o.key_width}-v{o.value_width}-g{o.group}-r{o.residual}",
)
@pytest.mark.parametrize("tokens", [1, 15, 16, 24, 33, 71])
def test_codes_equal_bit_for_bit(options: KiviOptions, tokens: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(tokens)
    keys = torch.randn(2, tokens, 16, generator=generator)
    keys[:, :, 3] *= 40  # a channel of outliers, as real keys have
    keys[:, :, 5] = 1.25  # and a constant one
    keys, values = keys.to(dtype), torch.randn(2, tokens, 16, generator=generator).to(dtype)
    layer = LayerDescriptor(0, "full", 4, 2, 16, 16, dtype, 0.25)
    made = KiviCompressor(options).compress(PrefixView.from_tensors([layer], [keys], [values]), CompressContext()).layers[0]
    assert isinstance(made, CodedLayer)
    expected = Streams(keys, values, options)
    check(dict(made.tensors()), "keys", expected.keys, options.key_width)
    check(dict(made.tensors()), "values", expected.values, options.value_width)
    assert torch.equal(made.keys.exact, keys[:, expected.encoded_keys :])
    assert torch.equal(made.values.exact, values[:, expected.encoded_values :])


def test_the_oracle_rounds_as_torch_does() -> None:
    for dtype in DTYPES:
        numbers = torch.randn(500, generator=torch.Generator().manual_seed(0)).abs() * torch.logspace(-7, 4, 500)
        assert [stored(float(x), dtype) for x in numbers] == numbers.to(dtype).double().tolist()


def test_golden_group() -> None:
    """By hand: 2 bits over [0, 3] has scale 1; 0.5 and 2.5 are ties and go to even."""
    codes, scale, low = group_codes([0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 2.9], 2, torch.float32)
    assert (codes, scale, low) == ([0, 0, 1, 2, 2, 2, 3, 3], 1.0, 0.0)
    assert packed(codes, 2).hex() == "90fa"
