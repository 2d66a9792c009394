from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vericache_compressor_turboquant import RotatedCodec, TurboQuantCompressor, TurboQuantOptions, lloyd_max
from vericache_compressor_turboquant.codecs import Lookup
from vericache_compressor_turboquant.plugin import vericache_compressors
from vericache_compressor_turboquant.rotation import Haar, SignedHadamard, hadamard, rotation
from vericache_core import CompressContext, CompressedKV, LayerDescriptor, PrefixView
from vericache_core.attention.online import AttentionState
from vericache_core.coded import CodedLayer
from vericache_core.errors import CompressorFault, OptionError, PayloadError
from vericache_core.packing import pack
from vericache_core.plugins.options import parse_options
from vericache_core.plugins.testing import isolated_registry

settings.register_profile("turboquant", deadline=None)
settings.load_profile("turboquant")

CONTEXT = CompressContext()
ALL_OPTIONS: list[dict[str, Any]] = [
    {},
    {"bits": 3, "residual": 5},
    {"key_bits": 1, "value_bits": 4, "values": "uniform"},
    {"mode": "prod", "bits": 2},
    {"rotation": "haar", "norm_correction": False, "seed": 3},
]
# Mean squared error of unit vectors: 1 to 4 bits.
TABLE = {
    16: (0.343, 0.106, 0.0301, 0.0081),
    64: (0.3584, 0.1145, 0.0334, 0.0091),
    128: (0.3609, 0.1160, 0.0340, 0.0093),
}


def descriptor(index: int = 0, dim: int = 16, value_dim: int = 16, dtype: torch.dtype = torch.bfloat16) -> LayerDescriptor:
    return LayerDescriptor(index, "full", 4, 2, dim, value_dim, dtype, dim**-0.5)


class Case:
    def __init__(self, tokens: int, layers: list[LayerDescriptor] | None = None) -> None:
        self.layers = layers or [descriptor(0), descriptor(1, dim=16, value_dim=24)]
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


def unit_vectors(dim: int, count: int = 4000) -> Tensor:
    rows = torch.randn(1, count, dim, generator=torch.Generator().manual_seed(dim))
    return torch.nn.functional.normalize(rows, dim=-1)


def coded(codec: RotatedCodec, rows: Tensor) -> Tensor:
    return codec.decode(codec.encode(rows))


# -- codebook --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "positive"),
    [(1, [0.7994]), (2, [0.4524, 1.5052]), (3, [0.2444, 0.7532, 1.3365, 2.1314])],
)
def test_codebook_digits_at_128(bits: int, positive: list[float]) -> None:
    scaled = [centroid * math.sqrt(128) for centroid in lloyd_max(128, bits)]
    assert scaled[1 << (bits - 1) :] == pytest.approx(positive, abs=2e-4)
    assert scaled == [-centroid for centroid in reversed(scaled)]


@pytest.mark.parametrize("dim", [4, 16, 80])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_codebook_is_a_fixed_point_by_simulation_free_integration(dim: int, bits: int) -> None:
    """Each centroid is the mean of its cell, by a plain Riemann sum that shares no code with the solver."""
    centroids = lloyd_max(dim, bits)
    points = torch.linspace(-1, 1, 400_001, dtype=torch.float64)
    weight = (1 - points**2).clamp(min=0) ** ((dim - 3) / 2)
    nearest = (points.unsqueeze(1) - torch.tensor(centroids, dtype=torch.float64)).abs().argmin(1)
    mass = torch.zeros(len(centroids), dtype=torch.float64).index_add_(0, nearest, weight)
    moment = torch.zeros(len(centroids), dtype=torch.float64).index_add_(0, nearest, weight * points)
    assert (moment / mass).tolist() == pytest.approx(centroids, abs=2e-5)


def test_codebook_refuses_tiny_dimensions() -> None:
    with pytest.raises(ValueError, match="at least 4"):
        lloyd_max(3, 2)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 7, 8, 80])
def test_looking_up_packed_codes_is_unpacking_and_looking_up(bits: int, count: int) -> None:
    centroids = torch.randn(1 << bits)
    codes = torch.randint(0, 1 << bits, (2, 5, count), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))
    assert torch.equal(Lookup(centroids, bits)(pack(codes, bits), count), centroids[codes.long()])


# -- rotation --------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [SignedHadamard(64, 1, "keys"), Haar(80, 1, "keys")], ids=["hadamard", "haar"])
def test_rotations_are_orthogonal(made: SignedHadamard | Haar) -> None:
    dim = 64 if isinstance(made, SignedHadamard) else 80
    matrix = made.forward(torch.eye(dim))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim), atol=1e-5, rtol=0)
    torch.testing.assert_close(made.backward(matrix), torch.eye(dim), atol=1e-5, rtol=0)


def test_haar_has_no_preferred_sign() -> None:
    """QR alone leaves the signs of the diagonal to the library, and with them the first column."""
    positive = sum(Haar(8, seed, "keys").matrix[0, 0].item() > 0 for seed in range(100))
    assert 25 < positive < 75


def test_hadamard_is_sylvester() -> None:
    by_hand = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
    assert torch.equal(hadamard(torch.eye(4)), by_hand)


def test_rotations_differ_by_seed_and_stream_and_repeat() -> None:
    signs = [rotation("auto", 64, seed, stream) for seed, stream in ((0, "keys"), (0, "values"), (1, "keys"))]
    drawn = [made.signs.tolist() for made in signs if isinstance(made, SignedHadamard)]
    assert len(drawn) == 3
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]
    assert SignedHadamard(64, 0, "keys").signs.tolist() == drawn[0]
    assert isinstance(rotation("auto", 80, 0, "keys"), Haar)


def test_signs_are_the_same_on_every_machine() -> None:
    assert SignedHadamard(64, 0, "keys").signs[:8].tolist() == [1, -1, 1, 1, 1, 1, -1, -1]


# -- accuracy --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_mean_squared_error_is_the_table(dim: int, bits: int) -> None:
    rows = unit_vectors(dim, 20_000)
    made = coded(RotatedCodec(dim, bits, rotation("auto", dim, 0, "keys"), norm_correction=False), rows)
    assert (made - rows).square().sum(-1).mean().item() == pytest.approx(TABLE[dim][bits - 1], rel=0.03)


@pytest.mark.parametrize("dim", [80, 256])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_mean_squared_error_is_the_optimum_at_other_sizes(dim: int, bits: int) -> None:
    centroids = torch.tensor(lloyd_max(dim, bits), dtype=torch.float64)
    points = torch.linspace(-1, 1, 100_001, dtype=torch.float64)
    weight = (1 - points**2) ** ((dim - 3) / 2)
    error = (points.unsqueeze(1) - centroids).abs().amin(1).square()
    optimum = dim * (weight * error).sum() / weight.sum()
    rows = unit_vectors(dim)
    made = coded(RotatedCodec(dim, bits, rotation("auto", dim, 0, "keys"), norm_correction=False), rows)
    assert (made - rows).square().sum(-1).mean().item() == pytest.approx(optimum.item(), rel=0.03)


@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_structured_vectors_fare_like_random_ones(dim: int, bits: int) -> None:
    """Over 64 seeds, because one vector is one draw; without signs the cosine would be near 0.6."""
    generator = torch.Generator().manual_seed(0)
    random_rows = torch.randn(1, 8, dim, generator=generator)
    cases = {
        "random": random_rows,
        "constant": torch.ones(1, 1, dim),
        "alternating": torch.tensor([1.0, -1.0]).repeat(dim // 2).view(1, 1, dim),
        "shifted": random_rows + 3,
    }
    cosines = {}
    for name, rows in cases.items():
        made = [coded(RotatedCodec(dim, bits, rotation("auto", dim, seed, "keys")), rows) for seed in range(64)]
        cosines[name] = torch.stack([torch.cosine_similarity(m, rows, dim=-1).mean() for m in made]).mean().item()
    for name, cosine in cosines.items():
        assert cosine > cosines["random"] * 0.99, (name, cosines)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_norm_correction_restores_the_length(bits: int) -> None:
    rows = torch.randn(1, 50, 64, generator=torch.Generator().manual_seed(0)) * 7
    made = coded(RotatedCodec(64, bits, rotation("auto", 64, 0, "keys")), rows)
    torch.testing.assert_close(made.norm(dim=-1), rows.norm(dim=-1), rtol=1e-3, atol=0)
    plain = coded(RotatedCodec(64, bits, rotation("auto", 64, 0, "keys"), norm_correction=False), rows)
    assert plain.norm(dim=-1).mean() < rows.norm(dim=-1).mean()


@pytest.mark.parametrize("kind", ["hadamard", "haar"])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_prod_is_unbiased_and_mse_is_not(bits: int, kind: str) -> None:
    """Slope of estimated against true products over many rotations; a wrong factor would give 0.09 or worse."""
    query, row = unit_vectors(64, 2).unbind(1)
    row = (query + row) / (query + row).norm()
    true = (query * row).sum().item()
    slopes = {}
    for sketch in (True, False):
        estimates = []
        for seed in range(300):
            other = rotation(kind, 64, seed, "sketch") if sketch else None
            codec = RotatedCodec(64, bits, rotation(kind, 64, seed, "keys"), norm_correction=False, sketch=other)
            estimates.append((coded(codec, row.view(1, 1, 64)).view(64) * query.view(64)).sum().item())
        slopes[sketch] = sum(estimates) / len(estimates) / true
    assert slopes[True] == pytest.approx(1, abs=0.02)
    assert slopes[False] == pytest.approx(1 - TABLE[64][bits - 1], abs=0.02)


def test_the_sketch_changes_the_output() -> None:
    rows, turned = unit_vectors(64, 10), rotation("auto", 64, 0, "keys")
    codec = RotatedCodec(64, 3, turned, sketch=rotation("auto", 64, 0, "sketch"))
    codes = dict(codec.encode(rows))
    without = codec.decode({**codes, "sketch_scale": torch.zeros_like(codes["sketch_scale"])})
    assert not torch.allclose(codec.decode(codes), without)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", ALL_OPTIONS, ids=str)
def test_zeros_and_extremes_stay_finite(options: dict[str, Any], dtype: torch.dtype) -> None:
    case = Case(8, [descriptor(dtype=dtype)])
    case.keys[0][:, 0], case.values[0][:, 0] = 0, 0
    case.keys[0][:, 1], case.values[0][:, 1] = 1e-7, -1e-7
    case.keys[0][:, 2], case.values[0][:, 2] = 65504, -65504
    case.keys[0][:, 3, ::2] = -65504
    held = layer_of(TurboQuantCompressor(TurboQuantOptions(**options)).compress(case.span(0, 8), CONTEXT))
    for stream in (held.keys, held.values):
        rows = torch.cat([piece.float() for _, piece in stream.pieces(100)], 1)
        assert torch.isfinite(rows).all()
        assert rows[:, 0].eq(0).all()


def test_vectors_too_large_for_float16_are_refused_by_name() -> None:
    case = Case(8)
    case.values[1][0, 3] = 200_000
    with pytest.raises(CompressorFault, match=r"turboquant: values of layer 1: .*float16"):
        TurboQuantCompressor().compress(case.span(0, 8), CONTEXT)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_refused_by_name(bad: float) -> None:
    case = Case(8)
    case.keys[1][0, 3, 0] = bad
    with pytest.raises(CompressorFault, match="turboquant: keys of layer 1 contain"):
        TurboQuantCompressor().compress(case.span(0, 8), CONTEXT)


# -- bytes, append, payload --------------------------------------------------------------------------


def formula(layer: LayerDescriptor, tokens: int, options: TurboQuantOptions) -> int:
    e, left = layer.dtype.itemsize, min(tokens, options.residual)
    dim, value_dim = layer.head_dim, layer.value_dim
    key = math.ceil(dim * options.key_width / 8) + 2
    if options.mode == "prod":
        key = math.ceil(dim * (options.key_width - 1) / 8) + math.ceil(dim / 8) + 4
    value = math.ceil(value_dim * options.value_width / 8) + (2 * e if options.values == "uniform" else 2)
    return layer.kv_heads * ((tokens - left) * (key + value) + left * (dim + value_dim) * e)


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 6, 100])
def test_bytes_are_the_formula(options: dict[str, Any], tokens: int) -> None:
    case, parsed = Case(tokens), TurboQuantOptions(**options)
    made = TurboQuantCompressor(parsed).compress(case.span(0, tokens), CONTEXT)
    made.check_integrity()
    assert [layer_of(made, i).nbytes for i in (0, 1)] == [formula(layer, tokens, parsed) for layer in case.layers]


def test_three_bits_at_head_dim_128_are_5x_smaller() -> None:
    case = Case(512, [descriptor(dim=128, value_dim=128)])
    made = TurboQuantCompressor(TurboQuantOptions(bits=3)).compress(case.span(0, 512), CONTEXT)
    assert case.span(0, 512).nbytes() / made.nbytes == pytest.approx(5.12)


@settings(max_examples=30)
@given(st.sampled_from(ALL_OPTIONS), st.integers(0, 30), st.lists(st.sampled_from([1, 2, 7, 16]), max_size=5))
def test_how_tokens_arrive_does_not_show_in_the_bytes(options: dict[str, Any], prompt: int, chunks: list[int]) -> None:
    compressor = TurboQuantCompressor(TurboQuantOptions(**options))
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


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=str)
def test_payload_round_trip(options: dict[str, Any]) -> None:
    case = Case(20)
    made = TurboQuantCompressor(TurboQuantOptions(**options)).compress(case.span(0, 20), CONTEXT)
    (spec,) = vericache_compressors()
    with isolated_registry(spec):
        again = CompressedKV.from_payload(made.to_payload())
        assert again.to_payload() == made.to_payload()
        assert torch.equal(layer_of(again).keys.decoded(), layer_of(made).keys.decoded())
        assert again.extra == {"algorithm": 1}
        older = CompressedKV(made.compressor, made.options, made.tokens, made.descriptors, made.layers, {"algorithm": 0})
        with pytest.raises(PayloadError, match="another version"):
            CompressedKV.from_payload(older.to_payload())


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=str)
def test_attending_in_the_rotated_space_is_attending_to_decoded_rows(options: dict[str, Any]) -> None:
    case = Case(70)
    held = layer_of(TurboQuantCompressor(TurboQuantOptions(**options)).compress(case.span(0, 70), CONTEXT), 1)
    query = torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(3))
    state, plain = AttentionState.fresh(4, 3, 24), AttentionState.fresh(4, 3, 24)
    held.block = 32
    held.attend(query, state)
    keys = torch.cat([rows.float() for _, rows in held.keys.pieces(1000)], 1)
    plain.fold(query, keys, torch.cat([rows.float() for _, rows in held.values.pieces(1000)], 1))
    torch.testing.assert_close(state.output(), plain.output(), rtol=1e-4, atol=1e-5)


def test_inputs_are_not_changed_and_strides_do_not_matter() -> None:
    case = Case(20, [descriptor(dtype=torch.float32)])
    made = TurboQuantCompressor().compress(case.span(0, 20), CONTEXT)
    assert [t._version for t in (*case.keys, *case.values)] == [0, 0]
    case.keys = [k.transpose(0, 2).contiguous().transpose(0, 2) for k in case.keys]
    assert TurboQuantCompressor().compress(case.span(0, 20), CONTEXT).to_payload() == made.to_payload()


def test_the_global_generator_is_neither_used_nor_moved() -> None:
    case, results = Case(20), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        rotation.cache_clear()
        results.append(
            TurboQuantCompressor(TurboQuantOptions(rotation="haar")).compress(case.span(0, 20), CONTEXT).to_payload()
        )
        assert torch.equal(torch.get_rng_state(), state)
    assert results[0] == results[1]


# -- options ---------------------------------------------------------------------------------------


def test_what_does_not_fit_the_layer_is_refused_before_anything_runs() -> None:
    with pytest.raises(OptionError, match=r"rotation=hadamard .* dimension 80 of layer 3.*haar"):
        TurboQuantCompressor(TurboQuantOptions(rotation="hadamard")).check_layers([descriptor(3, dim=80)])
    with pytest.raises(OptionError, match="dimension 2"):
        TurboQuantCompressor().check_layers([descriptor(0, dim=2)])
    TurboQuantCompressor().check_layers([descriptor(0, dim=80, value_dim=96)])


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"bits": "5"}, "bits"),
        ({"bits": "0"}, "bits"),
        ({"mode": "prod", "key_bits": "1"}, "key_bits"),
        ({"mode": "qjl"}, "mode"),
        ({"rotation": "none"}, "rotation"),
        ({"residual": "-1"}, "residual"),
        ({"keep": "0.5"}, "keep"),
    ],
    ids=str,
)
def test_bad_options_are_refused_by_name(given: dict[str, str], word: str) -> None:
    with pytest.raises(OptionError, match=word):
        parse_options(TurboQuantOptions, given)
