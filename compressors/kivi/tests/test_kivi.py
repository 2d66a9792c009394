from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vericache_compressor_kivi import KeyCodec, KiviCompressor, KiviOptions, ValueCodec
from vericache_compressor_kivi.plugin import vericache_compressors
from vericache_core import CompressContext, CompressedKV, LayerDescriptor, PrefixView
from vericache_core.attention.online import AttentionState
from vericache_core.coded import CodedLayer
from vericache_core.errors import CompressorFault, OptionError
from vericache_core.minmax import LARGEST_RANGE, quantize
from vericache_core.plugins.options import parse_options
from vericache_core.plugins.testing import isolated_registry

settings.register_profile("kivi", deadline=None)
settings.load_profile("kivi")

CONTEXT = CompressContext()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def descriptor(
    index: int = 0,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    value_dim: int = 16,
    dtype: torch.dtype = torch.bfloat16,
) -> LayerDescriptor:
    return LayerDescriptor(index, "full", heads, kv_heads, dim, value_dim, dtype, dim**-0.5)


class Case:
    """A random prompt whose spans can be looked at one after the other."""

    def __init__(self, tokens: int, layers: list[LayerDescriptor] | None = None) -> None:
        self.layers = layers or [descriptor(0), descriptor(1, heads=7, kv_heads=1, value_dim=32)]
        generator = torch.Generator().manual_seed(tokens)
        self.keys, self.values = [], []
        for layer in self.layers:
            self.keys.append(torch.randn(layer.kv_heads, tokens, layer.head_dim, generator=generator).to(layer.dtype))
            self.values.append(torch.randn(layer.kv_heads, tokens, layer.value_dim, generator=generator).to(layer.dtype))

    def span(self, start: int, stop: int) -> PrefixView:
        def read(i: int) -> tuple[Tensor, Tensor]:
            return self.keys[i][:, start:stop], self.values[i][:, start:stop]

        return PrefixView(self.layers, range(start, stop), read, start)


def layer_of(made: CompressedKV, index: int = 0) -> CodedLayer:
    layer = made.layers[index]
    assert isinstance(layer, CodedLayer)
    return layer


# -- boundaries, bytes, append ---------------------------------------------------------------------


def formula(layer: LayerDescriptor, tokens: int, options: KiviOptions) -> int:
    """The formula of the README, per layer."""
    e, g, r = layer.dtype.itemsize, options.group, options.residual
    n_k, n_v = tokens // r * r, max(0, tokens - r)
    bits = n_k * layer.head_dim * options.key_width + n_v * layer.value_dim * options.value_width
    assert bits % 8 == 0
    scales = n_k // g * layer.head_dim * 2 * e + n_v * (layer.value_dim // g) * 2 * e
    exact = (tokens - n_k) * layer.head_dim * e + min(tokens, r) * layer.value_dim * e
    return layer.kv_heads * (bits // 8 + scales + exact)


@pytest.mark.parametrize("tokens", [1, 15, 16, 31, 32, 33, 63, 64, 65, 200])
@pytest.mark.parametrize(
    "options",
    [
        KiviOptions(group=16, residual=32),
        KiviOptions(group=8, residual=16, bits=4),
        KiviOptions(group=8, residual=32, key_bits=4),
    ],
)
def test_boundaries_and_bytes_are_the_formula(tokens: int, options: KiviOptions) -> None:
    case = Case(tokens)
    made = KiviCompressor(options).compress(case.span(0, tokens), CONTEXT)
    made.check_integrity()
    for index, layer in enumerate(case.layers):
        held = layer_of(made, index)
        assert held.keys.encoded_tokens == tokens // options.residual * options.residual
        assert held.values.encoded_tokens == max(0, tokens - options.residual)
        assert held.nbytes == formula(layer, tokens, options)
    assert made.nbytes == sum(formula(layer, tokens, options) for layer in case.layers)


@pytest.mark.parametrize(("tokens", "ratio"), [(128, 1.68), (256, 2.56), (1000, 3.55), (4096, 5.00)])
def test_ratio_at_head_dim_128(tokens: int, ratio: float) -> None:
    layer = descriptor(heads=1, kv_heads=1, dim=128, value_dim=128)
    case = Case(tokens, [layer])
    made = KiviCompressor().compress(case.span(0, tokens), CONTEXT)
    assert made.nbytes == formula(layer, tokens, KiviOptions())
    assert case.span(0, tokens).nbytes() / made.nbytes == pytest.approx(ratio, abs=0.01)


@given(st.integers(0, 70), st.lists(st.sampled_from([1, 2, 3, 7, 16, 33, 40]), max_size=8))
def test_how_tokens_arrive_does_not_show_in_the_bytes(prompt: int, chunks: list[int]) -> None:
    compressor = KiviCompressor(KiviOptions(group=8, residual=16))
    case, at = Case(prompt + sum(chunks)), prompt
    grown = compressor.compress(case.span(0, prompt), CONTEXT)
    for chunk in chunks:
        grown = compressor.extend(grown, case.span(at, at + chunk), CONTEXT)
        at += chunk
    assert grown.to_payload() == compressor.compress(case.span(0, at), CONTEXT).to_payload()
    if chunks:
        before = at - chunks[-1]
        back = compressor.rollback(grown, chunks[-1], case.span(0, before))
        assert back.to_payload() == compressor.compress(case.span(0, before), CONTEXT).to_payload()


@given(st.integers(1, 90), st.integers(0, 90))
def test_rollback_without_the_prefix_changes_no_remaining_row(tokens: int, dropped: int) -> None:
    left = max(0, tokens - dropped)
    compressor, case = KiviCompressor(KiviOptions(group=8, residual=16)), Case(tokens)
    made = compressor.compress(case.span(0, tokens), CONTEXT)
    back = compressor.rollback(made, tokens - left)
    back.check_integrity()
    for index in range(2):
        for now, then in zip(
            (layer_of(back, index).keys, layer_of(back, index).values),
            (layer_of(made, index).keys, layer_of(made, index).values),
            strict=True,
        ):
            assert torch.equal(now.decoded(), then.decoded()[:, :left])


def test_a_prompt_shorter_than_the_residual_is_exact() -> None:
    case = Case(127)
    made = KiviCompressor(KiviOptions(group=16)).compress(case.span(0, 127), CONTEXT)
    assert torch.equal(layer_of(made).keys.decoded(), case.keys[0])
    assert torch.equal(layer_of(made, 1).values.decoded(), case.values[1])
    assert made.nbytes == case.span(0, 127).nbytes()


def test_payload_round_trip() -> None:
    compressor = KiviCompressor(KiviOptions(group=8, residual=16, key_bits=4))
    case = Case(77)
    made = compressor.rollback(compressor.compress(case.span(0, 77), CONTEXT), 22)
    (spec,) = vericache_compressors()
    with isolated_registry(spec):
        again = CompressedKV.from_payload(made.to_payload())
    assert again.to_payload() == made.to_payload()
    assert torch.equal(layer_of(again).keys.decoded(), layer_of(made).keys.decoded())
    more = compressor.extend(again, case.span(55, 77), CONTEXT)
    assert more.to_payload() == compressor.extend(made, case.span(55, 77), CONTEXT).to_payload()


# -- the error bound -------------------------------------------------------------------------------


def within_half_a_step(rows: Tensor, bits: int) -> None:
    """``|row - decoded| <= scale / 2``, up to half an ulp of the float32 result and the arithmetic before it.

    A scale below the normal numbers is a whole number of the smallest ones: half of one, once for each step of the codes.
    """
    codes, scale, low = quantize(rows, bits, "test")
    assert scale.dtype == low.dtype == rows.dtype
    assert torch.isfinite(scale).all()
    assert (scale > 0).all()
    assert int(codes.max()) < 1 << bits
    decoded = codes.float() * scale.float().unsqueeze(-1) + low.float().unsqueeze(-1)
    error = (decoded.double() - rows.double()).abs()
    facts = torch.finfo(rows.dtype)
    slack = (rows.double().abs() + low.double().abs().unsqueeze(-1)) * 2**-22
    slack += facts.smallest_normal * facts.eps * (1 << bits) / 2
    assert (error <= scale.double().unsqueeze(-1) / 2 + slack).all()
    assert torch.isfinite(decoded.to(rows.dtype)).all()
    constant = rows.amin(-1) == rows.amax(-1)
    assert torch.equal(decoded[constant], rows[constant].float())


@settings(max_examples=200)
@given(st.sampled_from(DTYPES), st.sampled_from([2, 4]), st.integers(-45, 37), st.integers(-45, 37), st.integers(0, 999))
def test_error_bound_at_every_size_and_offset(dtype: torch.dtype, bits: int, size: int, offset: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(20, 16, generator=generator, dtype=torch.float64) * 10.0**size
    rows = spread + torch.randn(20, 1, generator=generator, dtype=torch.float64) * 10.0**offset
    within_half_a_step(rows.clamp(-torch.finfo(dtype).max / 4, torch.finfo(dtype).max / 4).to(dtype), bits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize(
    "values",
    [
        [0.0],
        [3.0],
        [-100.0],
        [0.0, -0.0],
        [1e-7, 2e-7],
        [1.0, 1.0 + 1e-7],
        [1000.0, 1000.0 + 1e-7],
        [6e-8, 1.2e-7, 2.4e-7, 3e-7],
        [0.0, 6e-8],
        [1e-40, 3e-40, 9e-40],
        [0.0, 1.4e-45],
        [-65504.0, 65504.0],
        [-65504.0, 65504.0, 65472.0, 1.0],
        [65504.0],
        [65472.0, 65504.0, 64000.0],
    ],
    ids=str,
)
def test_degenerate_groups(values: list[float], bits: int, dtype: torch.dtype) -> None:
    rows = torch.tensor(values, dtype=torch.float64).repeat(16)[:16].to(dtype)
    within_half_a_step(rows.unsqueeze(0), bits)


def test_zeros_of_either_sign_give_the_same_bytes_in_any_order() -> None:
    zeros = torch.zeros(1, 1, 16)
    mixed = torch.where(torch.arange(16) % 3 == 0, -zeros, zeros)
    for rows in (mixed, mixed.flip(-1)):
        _, _, low = quantize(rows, 2, "test")
        assert not torch.signbit(low).any()


def test_a_range_beyond_float32_is_refused_by_name() -> None:
    layer = descriptor(dtype=torch.float32)
    case = Case(40, [layer])
    case.keys[0][0, 3, 2], case.keys[0][0, 4, 2] = 3e38, -3e38
    with pytest.raises(CompressorFault, match="kivi: keys of layer 0: max - min"):
        KiviCompressor(KiviOptions(group=8, residual=16)).compress(case.span(0, 40), CONTEXT)
    within_half_a_step(torch.tensor([[-LARGEST_RANGE / 2, LARGEST_RANGE / 2, 0.0, 1.0]]), 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("token", [0, 39])
def test_what_is_not_finite_is_refused_by_name(bad: float, part: str, token: int) -> None:
    case = Case(40)
    getattr(case, part)[1][0, token, 3] = bad
    with pytest.raises(CompressorFault, match=f"kivi: {part} of layer 1 contain"):
        KiviCompressor(KiviOptions(group=8, residual=16)).compress(case.span(0, 40), CONTEXT)


def test_per_channel_keys_survive_outlier_channels() -> None:
    """What the method is for: one huge channel costs the others nothing."""
    rows = torch.randn(1, 32, 16, generator=torch.Generator().manual_seed(0))
    rows[..., 3] += 150
    per_channel, per_token = KeyCodec(2, 32), ValueCodec(2, 16)
    good = (per_channel.decode(per_channel.encode(rows)) - rows).norm() / rows[..., :3].norm()
    bad = (per_token.decode(per_token.encode(rows)) - rows).norm() / rows[..., :3].norm()
    assert good < bad / 3


# -- behaviour -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 4])
def test_decoding_in_pieces_gives_the_same_bits(bits: int) -> None:
    case = Case(90)
    rows = layer_of(KiviCompressor(KiviOptions(group=8, residual=16, bits=bits)).compress(case.span(0, 90), CONTEXT))
    for stream in (rows.keys, rows.values):
        at_once = torch.cat([piece.float() for _, piece in stream.pieces(1000)], 1)
        assert torch.equal(at_once.to(torch.bfloat16), stream.decoded())
        for limit in (1, 8, 24):
            assert torch.equal(torch.cat([piece.float() for _, piece in stream.pieces(limit)], 1), at_once)


def test_attention_over_codes_is_attention_over_decoded_rows() -> None:
    case = Case(90)
    held = layer_of(KiviCompressor(KiviOptions(group=8, residual=16)).compress(case.span(0, 90), CONTEXT))
    query = torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(3))
    state, plain = AttentionState.fresh(4, 3, 16), AttentionState.fresh(4, 3, 16)
    held.block = 24
    held.attend(query, state)
    keys = torch.cat([rows.float() for _, rows in held.keys.pieces(1000)], 1)
    plain.fold(query, keys, torch.cat([rows.float() for _, rows in held.values.pieces(1000)], 1))
    torch.testing.assert_close(state.output(), plain.output())


def test_inputs_are_not_changed_and_strides_do_not_matter() -> None:
    compressor, case = KiviCompressor(KiviOptions(group=8, residual=16)), Case(50)
    versions = [t._version for t in (*case.keys, *case.values)]
    made = compressor.compress(case.span(0, 50), CONTEXT)
    assert [t._version for t in (*case.keys, *case.values)] == versions
    case.keys = [k.transpose(0, 2).contiguous().transpose(0, 2) for k in case.keys]
    case.values = [torch.stack([v, v], 3)[..., 1] for v in case.values]
    assert compressor.compress(case.span(0, 50), CONTEXT).to_payload() == made.to_payload()


@pytest.mark.parametrize("codec", [KeyCodec(2, 8), ValueCodec(4, 8)])
def test_codecs_do_not_change_float32_rows(codec: KeyCodec | ValueCodec) -> None:
    rows = torch.randn(2, 16, 8)
    codec.encode(rows)
    assert rows._version == 0


def test_sliding_layers_stay_uncompressed_and_are_no_reason_to_refuse() -> None:
    odd = LayerDescriptor(1, "sliding", 4, 2, 20, 20, torch.bfloat16, 1.0, 16)
    compressor = KiviCompressor(KiviOptions(group=8, residual=16))
    compressor.check_layers([descriptor(0), odd])
    assert [layer is None for layer in compressor.compress(Case(50, [descriptor(0), odd]).span(0, 50), CONTEXT).layers] == [
        False,
        True,
    ]


def test_a_group_that_does_not_divide_head_dim_is_refused_before_anything_runs() -> None:
    with pytest.raises(OptionError, match=r"group=32 .* dimension 80 of layer 2.*try group=16"):
        KiviCompressor().check_layers([descriptor(0, dim=64, value_dim=64), descriptor(2, dim=80, value_dim=80)])
    with pytest.raises(OptionError, match="group=32"):
        KiviCompressor().compress(Case(5).span(0, 5), CONTEXT)
    KiviCompressor().check_layers([descriptor(0, dim=80, value_dim=64)])  # keys are grouped along tokens


@pytest.mark.parametrize(("dim", "group"), [(80, 16), (20, 4), (60, 12), (30, None), (6, None), (1, None)])
def test_the_group_hinted_at_is_one_that_works(dim: int, group: int | None) -> None:
    options = KiviOptions(group=96, residual=96)
    layers = [descriptor(0, dim=dim, value_dim=dim)]
    with pytest.raises(OptionError, match="group=96") as caught:
        KiviCompressor(options).check_layers(layers)
    assert caught.value.hint == ("no group fits; use another compressor" if group is None else f"try group={group}")
    if group is not None:
        KiviCompressor(dataclasses.replace(options, group=group)).check_layers(layers)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"residual": "100"}, "residual=96"),
        ({"residual": "0"}, "residual"),
        ({"bits": "3"}, "bits"),
        ({"key_bits": "8"}, "key_bits"),
        ({"group": "6", "residual": "12"}, "group=8"),
        ({"group": "0"}, "group"),
        ({"keep": "0.5"}, "keep"),
    ],
    ids=str,
)
def test_bad_options_are_refused_by_name(given: dict[str, str], word: str) -> None:
    with pytest.raises(OptionError, match=word):
        parse_options(KiviOptions, given)


@pytest.mark.parametrize(
    ("given", "widths"),
    [({}, (2, 2)), ({"bits": 4}, (4, 4)), ({"bits": 4, "value_bits": 2}, (4, 2)), ({"key_bits": 4}, (4, 2))],
)
def test_bits_sets_both_widths(given: dict[str, Any], widths: tuple[int, int]) -> None:
    options = parse_options(KiviOptions, given)
    assert (options.key_width, options.value_width) == widths
