"""Kernels that read packed codes, beside decoding and folding; packing kernels beside their reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vericache_core.attention.online import AttentionState
from vericache_core.coded import Codec, CodedLayer, CodedRows
from vericache_core.compressor import QuantizationCompressor
from vericache_core.context import CompressContext
from vericache_core.index_map import HeadMap
from vericache_core.kv import LayerDescriptor, PrefixView
from vericache_core.packing import SUPPORTED_BITS, pack, unpack

pytest.importorskip("triton", reason="Triton is not installed")
from vericache_core.attention.triton_bits import pack_triton, unpack_triton
from vericache_core.attention.triton_codes import CHUNK, fold_codes

kivi = pytest.importorskip("vericache_compressor_kivi", reason="the kivi compressor is not installed")
turbo = pytest.importorskip("vericache_compressor_turboquant", reason="the turboquant compressor is not installed")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS = [(2, 2), (8, 2), (3, 1)]
"""Query heads and KV heads: MHA, GQA, MQA."""
WIDTHS = [64, 80, 96, 128, 256]


def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send attention to the kernels whatever the device."""
    monkeypatch.setattr("vericache_core.attention.fused.runs_on", lambda _: True)


def compressed(
    compressor: QuantizationCompressor, heads: tuple[int, int], width: int, tokens: int, dtype: torch.dtype
) -> CodedLayer:
    layer = LayerDescriptor(0, "full", heads[0], heads[1], width, width, dtype, width**-0.5)
    draw = torch.Generator().manual_seed(tokens)
    rows = [torch.randn(heads[1], tokens, width, generator=draw).to(DEVICE, dtype) for _ in range(2)]
    made = compressor.compress(PrefixView.from_tensors([layer], rows[:1], rows[1:]), CompressContext()).layers[0]
    assert isinstance(made, CodedLayer)
    return made


def attend_both(layer: CodedLayer, heads: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused attention gives the softmax state of decoding and folding, after a state that has seen keys already."""
    draw = torch.Generator().manual_seed(1)
    query = (torch.randn(heads, 2, width, generator=draw) * width**-0.5).to(DEVICE)
    kv_heads = layer.keys.exact.shape[0]
    before = [torch.randn(kv_heads, 5, width, generator=draw).to(DEVICE) for _ in range(2)]
    states = []
    for fused in (False, True):
        state = AttentionState.fresh(heads, 2, width, DEVICE)
        state.fold(query, *before)
        with monkeypatch.context() as patch:
            patch.setattr("vericache_core.attention.fused.runs_on", lambda _, fused=fused: fused)
            layer.attend(query, state)
        states.append(state)
    expected, found = states
    for part in ("top", "total", "acc"):
        torch.testing.assert_close(getattr(found, part), getattr(expected, part), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.output(), expected.output(), atol=1e-5, rtol=1e-5)


@pytest.fixture
def undecodable(monkeypatch: pytest.MonkeyPatch) -> Callable[[CodedLayer], None]:
    """Make decoding of a layer an error: what attends anyway reads codes."""

    def refuse(*_: Any) -> Tensor:
        raise AssertionError("codes were decoded")

    def arm(layer: CodedLayer) -> None:
        for rows in (layer.keys, layer.values):
            for name in ("decode", "rotated"):
                monkeypatch.setattr(rows.codec, name, refuse, raising=False)

    return arm


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_kivi(width: int, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    wide = (width + heads[0]) % 3 == 0
    options = kivi.KiviOptions(bits=4 if wide else 2, value_bits=2 if wide else None, group=16, residual=32)
    dtype = torch.bfloat16 if heads[0] == 8 else torch.float32
    attend_both(compressed(kivi.KiviCompressor(options), heads, width, 117, dtype), heads[0], width, monkeypatch)


@pytest.mark.parametrize("tokens", [1, 31, 32, 64, 95, CHUNK + 33, 2 * CHUNK])
def test_kivi_at_every_kind_of_boundary(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing encoded, keys only, both; keys and values cut in different places; several chunks."""
    layer = compressed(kivi.KiviCompressor(kivi.KiviOptions(group=8, residual=32)), (4, 2), 16, tokens, torch.float16)
    attend_both(layer, 4, 16, monkeypatch)


def test_kivi_over_several_segments_and_after_a_rollback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vericache_core.coded.SEGMENT_TOKENS", 40)
    compressor = kivi.KiviCompressor(kivi.KiviOptions(group=8, residual=8))
    layer = compressed(compressor, (2, 1), 16, 133, torch.float32)
    assert len(layer.keys.segments) == 4
    attend_both(layer, 2, 16, monkeypatch)
    shorter = CodedLayer(layer.keys.cut(59, 0, None), layer.values.cut(59, 0, None), HeadMap.everything(59, 1))
    assert shorter.keys.segments[-1].tokens % 8
    attend_both(shorter, 2, 16, monkeypatch)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_turboquant(width: int, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    bits = 1 + (width // 16 + heads[0]) % 4
    values = "uniform" if heads[1] == 1 else "mse"
    options = turbo.TurboQuantOptions(bits=bits, value_bits=5 - bits, values=values, residual=7)
    dtype = torch.bfloat16 if heads[0] == 8 else torch.float32
    attend_both(compressed(turbo.TurboQuantCompressor(options), heads, width, 71, dtype), heads[0], width, monkeypatch)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("width", [5, 16, 20])
def test_turboquant_rows_whose_codes_do_not_fill_bytes(width: int, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options = turbo.TurboQuantOptions(bits=bits, values="uniform")
    attend_both(compressed(turbo.TurboQuantCompressor(options), (2, 2), width, CHUNK + 1, torch.float32), 2, width, monkeypatch)


def test_a_sketch_is_left_to_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    options = turbo.TurboQuantOptions(bits=3, mode="prod")
    layer = compressed(turbo.TurboQuantCompressor(options), (2, 2), 16, 20, torch.float32)
    assert layer.keys.codec.layout is None
    attend_both(layer, 2, 16, monkeypatch)


@pytest.mark.parametrize("name", ["kivi", "turboquant"])
def test_nothing_is_decoded(name: str, undecodable: Callable[[CodedLayer], None], monkeypatch: pytest.MonkeyPatch) -> None:
    compressor = kivi.KiviCompressor() if name == "kivi" else turbo.TurboQuantCompressor()
    layer = compressed(compressor, (4, 2), 64, 300, torch.bfloat16)
    undecodable(layer)
    fake_cuda(monkeypatch)
    query, state = torch.randn(4, 1, 64, device=DEVICE), AttentionState.fresh(4, 1, 64, DEVICE)
    layer.attend(query, state)
    assert torch.isfinite(state.output()).all()


def test_no_rows_leave_the_state_as_it_was() -> None:
    class Nothing(Codec):
        def encode(self, rows: Tensor) -> dict[str, Tensor]:
            raise NotImplementedError

        def decode(self, codes: Any) -> Tensor:
            raise NotImplementedError

    empty = CodedRows(Nothing(), (), torch.zeros(2, 0, 16, device=DEVICE))
    state = AttentionState.fresh(4, 1, 16, DEVICE)
    fold_codes(torch.randn(4, 1, 16, device=DEVICE), state, empty, empty)
    assert bool((state.top == float("-inf")).all())
    assert not state.output().any()


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize("shape", [(3, 1), (2, 2, 7), (1, 8), (5, 9), (4, 80), (0, 8), (2, 0), (3, 3001)], ids=str)
def test_pack_and_unpack(shape: tuple[int, ...], bits: int) -> None:
    codes = torch.randint(0, 1 << bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    packed = pack(codes, bits)
    assert torch.equal(pack_triton(codes.to(DEVICE), bits).cpu(), packed)
    assert torch.equal(unpack_triton(packed.to(DEVICE), bits, shape[-1]).cpu(), unpack(packed, bits, shape[-1]))


def test_bad_input_is_refused() -> None:
    codes = torch.zeros(4, dtype=torch.uint8)
    with pytest.raises(ValueError, match="bits must be"):
        pack_triton(codes, 5)
    with pytest.raises(ValueError, match="uint8"):
        pack_triton(codes.int(), 2)
    with pytest.raises(ValueError, match="take 2 bytes"):
        unpack_triton(codes, 4, 3)
